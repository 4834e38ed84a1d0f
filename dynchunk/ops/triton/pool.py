"""Chunks to entries by Triton kernels."""

from __future__ import annotations

from typing import Any

from dynchunk_kernels import pool as kernels
from torch import Tensor

from dynchunk.ops._registration import define_triton, register
from dynchunk.ops.pool import SCHEMA, fake_pool


def _backward(grad: Tensor, entries: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    found = kernels.pool_backward(grad, *inputs)
    return tuple(grad.new_empty(0) if x is None else x for x in found)


OP = register("pool_triton", SCHEMA, kernels.pool, _backward, fake_pool, define=define_triton)
