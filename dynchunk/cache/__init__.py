"""Streaming state of chunked attention: append, crop, reorder, select, fork, save."""

from dynchunk.cache.cache import Cache
from dynchunk.cache.layer import LayerCache

__all__ = ["Cache", "LayerCache"]
