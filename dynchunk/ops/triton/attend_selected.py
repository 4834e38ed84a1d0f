"""Triton kernels of :mod:`dynchunk.ops.attend_selected`."""

from __future__ import annotations

from dynchunk_kernels import attend_selected as kernels

from dynchunk.ops._attention import fake_attended
from dynchunk.ops._registration import define_triton, register
from dynchunk.ops.attend_selected import SCHEMA

OP = register(
    "attend_selected_triton",
    SCHEMA,
    kernels.attend_selected,
    kernels.attend_selected_backward,
    fake_attended,
    define=define_triton,
)
