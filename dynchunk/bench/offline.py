"""The kernels compiled for GPUs that are not here: which configurations, and what to print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

from dynchunk.bench.accounting import AttendTile

if TYPE_CHECKING:  # it needs triton
    from dynchunk_kernels.offline import Case, Compiled


class Job(NamedTuple):
    """A configuration of a kernel to compile, by name, so that any process can do it."""

    module: str  #: of ``dynchunk_kernels``
    number: int  #: of its cases
    arch: int

    @property
    def case(self) -> Case:
        """The configuration."""
        from dynchunk_kernels.offline import cases_of

        return cases_of(self.module)[self.number]


def jobs(archs: Sequence[int], *, quick: bool = False) -> list[Job]:
    """Return the configurations of all kernels, with the architectures to compile them for.

    ``quick`` keeps two of each kernel and architecture: the largest one and the first.
    """
    from dynchunk_kernels import offline

    found = []
    for module in offline.modules():
        cases = offline.cases_of(module)
        for arch in archs:
            here = [Job(module, i, arch) for i, case in enumerate(cases) if arch in case.archs]
            found += _largest_and_first(here) if quick else here
    return found


def _largest_and_first(found: list[Job]) -> list[Job]:
    from dynchunk_kernels.offline import size_of

    by_kernel: dict[str, list[Job]] = {}
    for job in found:
        by_kernel.setdefault(job.case.kernel.__name__, []).append(job)
    chosen = []
    for of_kernel in by_kernel.values():
        largest = max(of_kernel, key=lambda job: size_of(job.case))
        chosen += [of_kernel[0]] if largest == of_kernel[0] else [of_kernel[0], largest]
    return chosen


def compiled(found: Sequence[Job], workers: int = 1) -> Iterator[Compiled]:
    """Compile in order, in as many processes."""
    if workers == 1 or len(found) < 2:
        yield from map(compile_job, found)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_job, found)


def compile_job(job: Job) -> Compiled:
    """Compile one configuration; what does not compile says so."""
    from dynchunk_kernels.offline import inspect

    return inspect(job.case, job.arch)


def attend_tiles() -> dict[str, tuple[int, AttendTile]]:
    """Return what :func:`~dynchunk.bench.accounting.account` counts: two well-known shapes.

    None where there is no Triton, and so no kernel.
    """
    import torch

    try:
        tiles = import_module("dynchunk_kernels.attend").tiles
    except ImportError:
        return {}
    found = {}
    for words, heads, width in (
        ("8 heads a KV head, D = 128", 8, 128),
        ("64 heads a KV head, D = 512", 64, 512),
    ):
        chosen = tiles("forward", 90, width, torch.bfloat16)
        found[words] = (heads, AttendTile(chosen.block_m, chosen.block_n, chosen.border))
    return found


def as_row(found: Compiled) -> dict[str, Any]:
    """Return one as JSON has it."""
    return found._asdict() | {"ok": found.ok, "occupancy": found.occupancy}
