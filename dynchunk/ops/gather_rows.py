"""Rows of a tensor by an index that may say "none": what packing into tiles and back both are.

    out_p = x_index[p], zero where index[p] = -1

No row of x is taken twice. So its transpose is the same operation with the index the other way
round, and so is the gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require
from dynchunk.ops._registration import Implementation, Schema, choose, register_forward
from dynchunk.ops._shapes import check
from dynchunk.ops.reference import gather_rows as reference

SCHEMA = Schema(
    differentiable=(),
    constant=("Tensor x", "Tensor index", "Tensor inverse"),
    outputs=("out",),
)


def fake_gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of the result."""
    return x.new_empty(index.shape[0], *x.shape[1:])


def add_gradient(op: CustomOpDef) -> CustomOpDef:
    """Make the operation its own backward; only the indices are kept for it."""

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return op(grad, inverse, index), None, None

    op.register_autograd(gradients, setup_context=setup_context)
    return op


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.gather_rows import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": add_gradient(
        register_forward("gather_rows_reference", SCHEMA, reference.gather_rows, fake_gather_rows)
    ),
    "triton": _triton,
}


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor, *, impl: str | None = None) -> Tensor:
    """Take rows by index, zeros where there is none.

    Parameters
    ----------
    x : tensor [T, ...]
    index : integer tensor [P]
        A row of ``x`` each, none twice, or -1.
    inverse : integer tensor [T]
        Where each row of ``x`` goes, or -1 if nowhere: the gradient's index.
    impl : {None, "reference", "triton"}

    Returns
    -------
    tensor [P, ...]

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> gather_rows(x, torch.tensor([1, -1, 0]), torch.tensor([2, 0])).flatten()
    tensor([2., 0., 1.])
    """
    require(isinstance(x, Tensor) and x.ndim >= 1, "x", "a tensor [T, ...]", x)
    check("index", index, "P", {}, "integer")
    check("inverse", inverse, "T", {"T": len(x)}, "integer")
    out: Tensor = choose(impl, OPS, x)(x, index, inverse)
    return out
