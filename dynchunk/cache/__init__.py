"""Streaming state of chunked attention: append, crop, reorder, select, fork, save.

Built on :mod:`dynchunk.attention`, whose modules know a cache only by what they call
(:mod:`dynchunk.attention.streaming`): it needs their policies, they need not its pages.
"""

from dynchunk.cache.cache import Cache
from dynchunk.cache.layer import LayerCache

__all__ = ["Cache", "LayerCache"]
