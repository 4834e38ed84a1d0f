"""The softmax that pools a chunk, token by token, by Triton kernels."""

from __future__ import annotations

from dynchunk_kernels import pool as kernels

from dynchunk.ops._registration import define_triton, register_forward
from dynchunk.ops.pool_state import SCHEMA, fake_pool_state

OP = register_forward(
    "pool_state_triton", SCHEMA, kernels.pool_state, fake_pool_state, define=define_triton
)
