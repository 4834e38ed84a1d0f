"""Rows of a tensor by an index that may say "none"."""

from __future__ import annotations

from torch import Tensor


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return the rows of x at ``index``, zeros where it is negative."""
    if len(x) == 0:
        return x.new_zeros(len(index), *x.shape[1:])
    is_none = (index < 0).reshape(-1, *[1] * (x.ndim - 1))
    return x.index_select(0, index.clamp(min=0)).masked_fill(is_none, 0)
