"""Registration with ``torch.library``: what every differentiable operation does alike.

An implementation of operation ``f`` is a pair of functions, ``f`` and ``f_backward``. They become
``dynchunk::f_<impl>`` and ``dynchunk::f_<impl>_backward``, which ``torch.compile`` takes as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dynchunk._checks import require_choice

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


class Schema(NamedTuple):
    """Signature of an operation, tensors first.

    The backward takes (gradients of the outputs, outputs, all inputs) and returns one gradient for
    each differentiable input, an empty tensor for one that is None.
    """

    differentiable: tuple[str, ...]  #: types and names, such as ``"Tensor? bias"``
    constant: tuple[str, ...]  #: integer tensors, then numbers
    outputs: tuple[str, ...]  #: names

    @property
    def forward(self) -> str:
        """Schema of the operation."""
        returned = ", ".join(f"Tensor {name}" for name in self.outputs)
        return f"({', '.join(self.differentiable + self.constant)}) -> ({returned})"

    @property
    def backward(self) -> str:
        """Schema of its backward."""
        given = [f"Tensor grad_{name}" for name in self.outputs]
        given += [f"Tensor {name}" for name in self.outputs]
        inputs = ", ".join([*given, *self.differentiable, *self.constant])
        return f"({inputs}) -> ({', '.join(['Tensor'] * len(self.differentiable))})"


def register(
    name: str,
    schema: Schema,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    fake: Callable[..., Any],
) -> CustomOpDef:
    """Register an implementation, its shapes (``fake``) and its gradient; return the operation."""
    op = _define(name, forward, schema.forward)
    op_backward = _define(f"{name}_backward", backward, schema.backward)
    n_outputs, n_grads = len(schema.outputs), len(schema.differentiable)

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        inputs = args[2 * n_outputs :][:n_grads]
        return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.numbers = inputs[len(tensors) :]
        ctx.save_for_backward(*outputs, *tensors)

    def gradients(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = op_backward(*grad_outputs, *saved, *ctx.numbers)
        inputs = saved[n_outputs:][:n_grads]
        grads = [None if x is None else g for x, g in zip(inputs, found, strict=True)]
        return (*grads, *[None] * len(schema.constant))

    op.register_fake(fake)
    op_backward.register_fake(fake_backward)
    op.register_autograd(gradients, setup_context=setup_context)
    return op


def choose(impl: str | None, ops: Mapping[str, CustomOpDef]) -> CustomOpDef:
    """Return the implementation of that name; None means the one that runs on any device."""
    require_choice("impl", impl, (None, *ops))
    return ops["reference" if impl is None else impl]


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Dtype in which an operation accumulates: float64 if an operand is that, float32 otherwise."""
    is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_double else torch.float32


def _define(name: str, function: Callable[..., Any], schema: str) -> CustomOpDef:
    return torch.library.custom_op(f"dynchunk::{name}", function, mutates_args=(), schema=schema)
