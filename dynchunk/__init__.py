"""KV-cache compression in chunks whose boundaries follow the content, not a fixed grid.

The names below are the ones to start with; the rest is one level down: ``dynchunk.boundaries``,
``dynchunk.packing``, ``dynchunk.attention``, ``dynchunk.cache``, ``dynchunk.testing``,
``dynchunk.audit``. A boundary is the FIRST token of a chunk.
"""

from typing import Any

from dynchunk.boundaries import (
    BoundaryRule,
    DelimiterScore,
    FixedStride,
    HashScore,
    KeyChangeScore,
    SharePlan,
    SimilarityScore,
    SurprisalScore,
    agreement,
    calibrate,
)
from dynchunk.chunks import NEVER, Chunks, Kind, cu_seqlens_from_mask
from dynchunk.packing import Packed, TilePlan, pack, plan_tiles, unpack

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "BoundaryRule",
    "Chunks",
    "DelimiterScore",
    "FixedStride",
    "HashScore",
    "KeyChangeScore",
    "Kind",
    "Packed",
    "SharePlan",
    "SimilarityScore",
    "SurprisalScore",
    "TilePlan",
    "agreement",
    "attend",
    "calibrate",
    "cu_seqlens_from_mask",
    "pack",
    "plan_tiles",
    "unpack",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import what needs more than torch when it is first used."""
    if name in ("unwrap", "wrap"):
        from dynchunk.integrations import wrap as module

        return getattr(module, name)
    if name == "attend":
        from dynchunk.integrations.torch_attention import attend

        return attend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
