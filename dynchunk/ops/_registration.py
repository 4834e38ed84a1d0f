"""Registration with ``torch.library``: what every operation does alike.

An implementation of operation ``f`` is a pair of functions, ``f`` and ``f_backward``. They become
``dynchunk::f_<impl>`` and ``dynchunk::f_<impl>_backward``, which ``torch.compile`` takes as they
are; an operation that only serves has no backward. Those that launch Triton kernels are Triton
operations: the compiler sees the kernels.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require, require_choice


class Schema(NamedTuple):
    """Signature of an operation, tensors first.

    The backward takes (gradients of the outputs, outputs, all inputs) and returns one gradient for
    each differentiable input, an empty tensor for one that is None.
    """

    differentiable: tuple[str, ...]  #: types and names, such as ``"Tensor? bias"``
    constant: tuple[str, ...]  #: tensors, then numbers
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
    *,
    define: Callable[[str, Callable[..., Any], str], CustomOpDef] | None = None,
) -> CustomOpDef:
    """Register an implementation, its shapes (``fake``) and its gradient; return the operation.

    ``define`` makes an operation of a name, a function and a schema: :func:`define_triton` for
    functions that launch Triton kernels.
    """
    op = register_forward(name, schema, forward, fake, define=define)
    op_backward = (define or _define)(f"{name}_backward", backward, schema.backward)
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

    op_backward.register_fake(fake_backward)
    op.register_autograd(gradients, setup_context=setup_context)
    return op


def register_forward(
    name: str,
    schema: Schema,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    define: Callable[[str, Callable[..., Any], str], CustomOpDef] | None = None,
) -> CustomOpDef:
    """Register an implementation that has no gradient: going back through it is an error."""
    op = (define or _define)(name, forward, schema.forward)
    op.register_fake(fake)
    return op


def register_step(
    name: str, schema: Schema, forward: Callable[..., Any], fake: Callable[..., Any]
) -> CustomOpDef:
    """Register what a step of a few tokens takes, as :func:`register_forward` does.

    :func:`choose` returns the function itself where nothing in torch's dispatcher would act on the
    call: the way through it and back takes as long as much of the step's work.
    """
    op = register_forward(name, schema, forward, fake)
    _steps[op] = forward
    return op


_steps: dict[CustomOpDef, Callable[..., Any]] = {}


def _is_direct(operands: tuple[Tensor | None, ...]) -> bool:
    """Whether no compiler, mode, profiler, subclass or gradient has to see the operation."""
    if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
        return False
    differentiates = torch.is_grad_enabled()
    return torch._C._len_torch_dispatch_stack() == 0 and all(
        x is None
        or (type(x) in (Tensor, torch.nn.Parameter) and not (differentiates and x.requires_grad))
        for x in operands
    )


def imported(module: str, name: str) -> Callable[..., Any]:
    """Return a function of ``dynchunk.ops.<module>`` that is imported when it is first called.

    So that numba is imported where its loops run, and nowhere else.
    """

    @lru_cache(maxsize=1)
    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"dynchunk.ops.{module}"), name)
        return found

    def call(*args: Any) -> Any:
        return function()(*args)

    return call


#: An operation, or what imports it: a kernel's libraries are imported when it is first used. By an
#: import statement: torch.compile follows that into a first call, and stops at importlib.
Implementation = CustomOpDef | Callable[[], CustomOpDef]


def choose(
    impl: str | None, ops: Mapping[str, Implementation], *operands: Tensor | None
) -> Callable[..., Any]:
    """Return the implementation of that name.

    None picks what :func:`default_impl` says.
    """
    require_choice("impl", impl, (None, *ops))
    device = next(x.device.type for x in operands if x is not None)
    if impl is None:
        impl = default_impl(ops, device, wide_dtype(*operands)).impl
    elif impl in _DEVICES:
        ok = device == _DEVICES[impl] or (impl == "triton" and _is_interpreted())
        others = " or ".join(repr(name) for name in ops if name not in _DEVICES)
        require(ok, "impl", f"{others} for tensors on {device!r}", impl)
        ok = impl != "triton" or wide_dtype(*operands) != torch.float64
        require(ok, "impl", f"{others} for float64", impl)
    found = ops[impl]
    op = found if isinstance(found, CustomOpDef) else found()
    return _steps[op] if op in _steps and _is_direct(operands) else op


class Default(NamedTuple):
    """What an operation uses where no implementation is named."""

    impl: str
    why: str


def default_impl(ops: Mapping[str, Implementation], device: str, dtype: torch.dtype) -> Default:
    """Return the implementation for operands of a device and dtype.

    The kernels of the device, where there are some: Triton on a GPU, numba on the CPU; the
    reference for float64, and elsewhere.
    """
    kernels = _KERNELS.get(device)
    if dtype == torch.float64:
        return Default("reference", "no kernel computes in float64")
    if kernels is None:
        return Default("reference", f"there are no kernels for {device!r}")
    if kernels not in ops:
        return Default("reference", f"{kernels!r} is not built for it")
    return Default(kernels, f"kernels for tensors on {device!r}")


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


_DEVICES = {"triton": "cuda", "cpu": "cpu"}
_KERNELS = {device: impl for impl, device in _DEVICES.items()}


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Dtype in which an operation accumulates: float64 if an operand is that, float32 otherwise."""
    is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_double else torch.float32


def _define(name: str, function: Callable[..., Any], schema: str) -> CustomOpDef:
    return torch.library.custom_op(f"dynchunk::{name}", function, mutates_args=(), schema=schema)


def define_triton(name: str, function: Callable[..., Any], schema: str) -> CustomOpDef:
    """Define an operation that launches Triton kernels through ``torch.library.wrap_triton``."""
    if _is_interpreted():  # then there is no kernel to show to the compiler
        return _define(name, function, schema)

    def launch(*args: Any) -> Any:
        return function(*args)

    # triton_op reads the schema from annotations.
    launch.__signature__ = _signature(schema)  # type: ignore[attr-defined]
    return cast(CustomOpDef, torch.library.triton_op(f"dynchunk::{name}", launch, mutates_args=()))


_ANNOTATIONS = {"Tensor": Tensor, "Tensor?": Tensor | None, "SymInt": int, "float": float}


def _signature(schema: str) -> inspect.Signature:
    """Return the signature of a function with that schema."""
    inputs, outputs = (part.strip(" ()").split(", ") for part in schema.split("->"))
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_ANNOTATIONS[kind]
        )
        for kind, name in (item.split() for item in inputs)
    ]
    n = len(outputs)
    returned = Tensor if n == 1 else tuple[(Tensor,) * n]  # type: ignore[misc]
    return inspect.Signature(parameters, return_annotation=returned)
