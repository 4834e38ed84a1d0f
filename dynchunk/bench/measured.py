"""Times of the kernels on the GPU at hand, beside ceilings that are measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dynchunk.bench.problems import Maker, Problem, Sizes
from dynchunk.chunks import Chunks

#: Runs a function repeatedly and returns the median of its milliseconds.
Timer = Callable[[Callable[[], object]], float]

LARGE = Sizes(
    lengths=(16_384,),
    heads=32,
    kv_heads=4,
    width=128,
    window=128,
    topk=512,
    index_heads=64,
    contexts=(6_800,) * 64,
)
#: DeepSeek V4: one KV head of 512 channels, keys that are values.
WIDE = LARGE._replace(heads=64, kv_heads=1, width=512)
#: For what memory bounds: far more than caches hold.
LONG = LARGE._replace(lengths=(131_072,) * 4, kv_heads=1, width=512)


class Measurement(NamedTuple):
    """One pass of one operation."""

    operation: str
    shape: str
    direction: str  #: "forward" or "backward"
    milliseconds: float
    tflops: float | None  #: useful ones
    gigabytes: float | None  #: a second, of what has to be moved
    of_ceiling: float | None  #: of the matmul's TFLOP/s or the copy's GB/s in this run


def is_possible() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def measure(
    device: torch.device | None = None,
    *,
    timer: Timer | None = None,
    large: Sizes = LARGE,
    wide: Sizes = WIDE,
    long: Sizes = LONG,
    ceiling: int = 8192,
    impl: str | None = None,
) -> Iterator[Measurement]:
    """Time all operations that have Triton kernels.

    Parameters
    ----------
    device : torch.device, optional
        Default: the current CUDA device.
    timer : callable, optional
        Default: ``triton.testing.do_bench``, medians.
    large, wide, long : Sizes
        Of grouped-query attention, of DeepSeek V4's, and of what memory bounds.
    ceiling : int
        Rows of the square matrices whose product is the ceiling.
    impl : str, optional
        Of the operations. Default: as users get them.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    timer = timer or _median
    ceilings = list(_ceilings(device, timer, ceiling))
    yield from ceilings
    tflops, gigabytes = ceilings[0].tflops, ceilings[1].gigabytes
    for problem, shape in _problems(device, large, wide, long):
        for found in _passes(problem, shape, timer, impl):
            yield _relative(found, tflops, gigabytes)
    for found in _dense(device, large, timer):
        yield _relative(found, tflops, gigabytes)


def _ceilings(device: torch.device, timer: Timer, n: int) -> Iterator[Measurement]:
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    time = timer(lambda: a @ b)
    shape = f"{n} x {n} bfloat16"
    yield Measurement("matmul", shape, "forward", time, 2 * n**3 / time / 1e9, None, 1.0)
    source = torch.randn(n * n * 4, device=device)
    target = torch.empty_like(source)
    time = timer(lambda: target.copy_(source))
    moved = 2 * source.numel() * source.element_size()
    shape = f"{moved / 2**31:.2f} GiB"
    yield Measurement("copy", shape, "forward", time, None, moved / time / 1e6, 1.0)


def _problems(
    device: torch.device, large: Sizes, wide: Sizes, long: Sizes
) -> Iterator[tuple[Problem, str]]:
    """Yield problems with a word on their chunks: by content, then on a grid of that ratio."""
    dtype = torch.bfloat16
    for sizes, kind in ((long, Maker.moving), (large, Maker.attending)):
        content = Maker(sizes, dtype, device)
        yield from ((problem, "content boundaries") for problem in kind(content))
        stride = round(content.chunks.ratio)
        grid = Chunks.fixed(stride, content.chunks.cu_seqlens)
        fixed = Maker(sizes, dtype, device, chunks=grid)
        unlike = ("boundaries", "decode", "decode_topk")  # no grid, or the same as by content
        words = f"fixed stride {stride}"
        yield from ((problem, words) for problem in kind(fixed) if problem.name not in unlike)
        del content, fixed
    for problem in Maker(wide, dtype, device).attending():
        if problem.name == "attend_selected":
            yield problem, "64 heads of 512, one KV head"


def _passes(problem: Problem, shape: str, timer: Timer, impl: str | None) -> Iterator[Measurement]:
    name = f"{problem.name} ({problem.options})"
    leaves = {key: x.detach() for key, x in problem.inputs.items()}
    with torch.no_grad():
        time = timer(lambda: problem.call(leaves, impl))
    yield _rates(name, shape, "forward", time, problem.flops[0], problem.bytes[0])
    if not problem.differentiable:
        return
    wanted = [leaves[key].requires_grad_() for key in problem.differentiable]
    out = problem.call(leaves, impl)[0]
    grad = torch.ones_like(out).where(out.isfinite(), 0)
    time = timer(lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True))
    yield _rates(name, shape, "backward", time, problem.flops[1], problem.bytes[1])


def _dense(device: torch.device, sizes: Sizes, timer: Timer) -> Iterator[Measurement]:
    """Time torch's dense causal attention over the same tokens."""
    shape = (1, sizes.heads, sum(sizes.lengths), sizes.width)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def attend() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    tokens = shape[2]
    flops = 4 * sizes.width * sizes.heads * (tokens * (tokens + 1) // 2)
    with torch.no_grad():
        time = timer(attend)
    words = f"dense causal, {tokens} tokens"
    yield _rates("scaled_dot_product_attention", words, "forward", time, flops, 0)
    out = attend()
    grad = torch.ones_like(out)
    time = timer(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    flops = flops * 5 // 2
    yield _rates("scaled_dot_product_attention", words, "backward", time, flops, 0)


def _rates(
    operation: str, shape: str, direction: str, time: float, flops: int, moved: int
) -> Measurement:
    tflops = flops / time / 1e9 if flops else None
    gigabytes = moved / time / 1e6 if moved else None
    return Measurement(operation, shape, direction, time, tflops, gigabytes, None)


def _relative(found: Measurement, tflops: float | None, gigabytes: float | None) -> Measurement:
    share = None
    if found.tflops is not None and tflops:
        share = found.tflops / tflops
    elif found.gigabytes is not None and gigabytes:
        share = found.gigabytes / gigabytes
    return found._replace(of_ceiling=share)


def _median(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, return_mode="median"))
