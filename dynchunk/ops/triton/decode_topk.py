"""Triton kernels of :mod:`dynchunk.ops.decode_topk`."""

from __future__ import annotations

from dynchunk_kernels import index_topk as kernels

from dynchunk.ops._registration import define_triton, register_forward
from dynchunk.ops.decode_topk import SCHEMA, fake

OP = register_forward("decode_topk_triton", SCHEMA, kernels.decode_topk, fake, define=define_triton)
