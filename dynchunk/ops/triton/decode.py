"""Attention over a paged cache by Triton kernels."""

from __future__ import annotations

from dynchunk_kernels import decode as kernels

from dynchunk.ops._attention import fake_attended
from dynchunk.ops._registration import define_triton, register_forward
from dynchunk.ops.decode import SCHEMA

OP = register_forward("decode_triton", SCHEMA, kernels.decode, fake_attended, define=define_triton)
