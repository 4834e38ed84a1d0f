"""What a chunk leaves where nothing is pooled: choices of whole chunks, one file each."""

from dynchunk.reduction.evict import chunks_to_keep, observed_attention

__all__ = ["chunks_to_keep", "observed_attention"]
