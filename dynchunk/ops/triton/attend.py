"""Attention over entries, raw tokens and a sink by Triton kernels."""

from __future__ import annotations

from dynchunk_kernels import attend as kernels

from dynchunk.ops._attention import fake_attended
from dynchunk.ops._registration import define_triton, register
from dynchunk.ops.attend import SCHEMA

OP = register(
    "attend_triton",
    SCHEMA,
    kernels.attend,
    kernels.attend_backward,
    fake_attended,
    define=define_triton,
)
