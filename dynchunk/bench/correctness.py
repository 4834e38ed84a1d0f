"""Every operation's kernels against the float64 reference, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk.bench.problems import Maker, Problem, Sizes

SMALL = Sizes(
    lengths=(63, 1, 0, 257, 111),
    heads=8,
    kv_heads=2,
    width=80,
    window=16,
    topk=7,
    index_heads=4,
    contexts=(1, 63, 200, 0),
)

#: Largest error by dtype: relative RMS.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}


class Check(NamedTuple):
    """One output or gradient of one problem."""

    operation: str
    options: str
    dtype: str
    output: str
    error: float  #: RMS of the error over RMS of the result; whole numbers: share of wrong ones
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def check(
    device: torch.device,
    *,
    sizes: Sizes = SMALL,
    seed: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Iterator[Check]:
    """Compare all operations that have Triton kernels, forward and backward.

    Parameters
    ----------
    device : torch.device
        A CUDA device; the CPU in a process with ``TRITON_INTERPRET=1``.
    sizes : Sizes
    seed : int, optional
        Default: a fresh one.
    dtypes : tuple of torch.dtype
        Of the inputs; the reference gets the same numbers in float64.
    """
    seed = torch.seed() % 2**31 if seed is None else seed
    for dtype in dtypes:
        maker = Maker(sizes, dtype, device, seed=seed)
        for problem in chain(maker.moving(), maker.attending()):
            _poison(device)
            yield from compare(problem, dtype)


def compare(problem: Problem, dtype: torch.dtype) -> Iterator[Check]:
    """Compare the kernels' outputs and gradients with those of the reference in float64."""
    found = results(problem, problem.inputs, "triton")
    wide = {name: x.double() for name, x in problem.inputs.items()}
    expected = results(problem, wide, "reference")
    for name, x in found.items():
        yield Check(
            problem.name,
            problem.options,
            str(dtype).removeprefix("torch."),
            name,
            error(x, expected[name]),
            TOLERANCE[dtype] if x.is_floating_point() else 0.0,
        )


def results(problem: Problem, inputs: dict[str, Tensor], impl: str | None) -> dict[str, Tensor]:
    """Return outputs and gradients by name, for gradients of outputs that are everywhere alike."""
    leaves = {name: x.detach() for name, x in inputs.items()}
    for name in problem.differentiable:
        leaves[name] = leaves[name].clone().requires_grad_()
    outputs = list(problem.call(leaves, impl))
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    if problem.differentiable:
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        through = [x for x in outputs if x.requires_grad]
        grads = [_direction(x, generator) for x in through]
        wanted = [leaves[name] for name in problem.differentiable]
        gradients = torch.autograd.grad(through, wanted, grads)
        found |= {
            f"gradient of {n}": g for n, g in zip(problem.differentiable, gradients, strict=True)
        }
    return found


def _direction(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a gradient of an output, of numbers that bfloat16 has; zero where it is -inf."""
    grad = torch.randn(x.shape, generator=generator, device=x.device).bfloat16().to(x.dtype)
    return grad.where(x.isfinite(), 0)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative RMS error; infinite if they differ where one is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    if not found.is_floating_point():
        return float((found != expected).double().mean())
    found, expected = found.double(), expected.double()
    is_finite = expected.isfinite()
    if not torch.equal(found[~is_finite], expected[~is_finite]):
        return float("inf")
    wrong = (found - expected)[is_finite].square().sum().sqrt()
    size = expected[is_finite].square().sum().sqrt()
    return float(wrong / size) if size else float(wrong)


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), torch.nan, device=device)
