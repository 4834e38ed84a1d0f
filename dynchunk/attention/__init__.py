"""Attention over chunks: policies, a function, modules, a small language model."""

from dynchunk.attention.checkpoint import load, save
from dynchunk.attention.chunked import ChunkedAttention, Mixed
from dynchunk.attention.compressor import Compressor
from dynchunk.attention.config import ModelConfig
from dynchunk.attention.functional import attend_entries, chunk_attention
from dynchunk.attention.indexer import Indexer
from dynchunk.attention.layout import Layout, one_chunk_each
from dynchunk.attention.policy import Policy, chunk_kv, csa, csa2, full, hca, quest, sliding
from dynchunk.attention.specs import (
    All,
    AsScored,
    Evict,
    GatedPool,
    Hash,
    Learned,
    MeanPool,
    Midpoints,
    Quest,
    Raw,
    Rescored,
    Rope,
    Router,
    Shifted,
    TokenClasses,
    TopK,
    Yarn,
)
from dynchunk.attention.transformer import ChunkedTransformer, Output

__all__ = [
    "All",
    "AsScored",
    "ChunkedAttention",
    "ChunkedTransformer",
    "Compressor",
    "Evict",
    "GatedPool",
    "Hash",
    "Indexer",
    "Layout",
    "Learned",
    "MeanPool",
    "Midpoints",
    "Mixed",
    "ModelConfig",
    "Output",
    "Policy",
    "Quest",
    "Raw",
    "Rescored",
    "Rope",
    "Router",
    "Shifted",
    "TokenClasses",
    "TopK",
    "Yarn",
    "attend_entries",
    "chunk_attention",
    "chunk_kv",
    "csa",
    "csa2",
    "full",
    "hca",
    "load",
    "one_chunk_each",
    "quest",
    "save",
    "sliding",
]
