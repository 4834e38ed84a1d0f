"""Triton kernels of :mod:`dynchunk.ops.attend_selected_chunks`."""

from __future__ import annotations

from dynchunk_kernels import attend_selected_chunks as kernels

from dynchunk.ops._attention import fake_attended
from dynchunk.ops._registration import define_triton, register
from dynchunk.ops.attend_selected_chunks import SCHEMA

OP = register(
    "attend_selected_chunks_triton",
    SCHEMA,
    kernels.attend_selected_chunks,
    kernels.attend_selected_chunks_backward,
    fake_attended,
    define=define_triton,
)
