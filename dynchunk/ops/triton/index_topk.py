"""Triton kernels of :mod:`dynchunk.ops.index_topk`."""

from __future__ import annotations

from dynchunk_kernels import index_topk as kernels

from dynchunk.ops._registration import define_triton, register
from dynchunk.ops.index_topk import SCHEMA, fake

OP = register(
    "index_topk_triton",
    SCHEMA,
    kernels.index_topk,
    kernels.index_topk_backward,
    fake,
    define=define_triton,
)
