"""Rows of a tensor by an index that may say "none", by a Triton kernel."""

from __future__ import annotations

from dynchunk_kernels import pack as kernels
from torch import Tensor

from dynchunk.ops._registration import define_triton, register_forward
from dynchunk.ops.gather_rows import SCHEMA, add_gradient, fake_gather_rows


def _gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    return kernels.gather_rows(x, index)


OP = add_gradient(
    register_forward(
        "gather_rows_triton", SCHEMA, _gather_rows, fake_gather_rows, define=define_triton
    )
)
