"""The kernels compiled for GPUs that are not here: which configurations, and what to print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynchunk.bench.accounting import AttendTile

if TYPE_CHECKING:  # it needs triton
    from dynchunk_kernels.offline import Case, Compiled


def jobs(archs: Sequence[int], *, quick: bool = False) -> list[tuple[Case, int]]:
    """Return the configurations of all kernels, with the architectures to compile them for.

    ``quick`` keeps two of each kernel and architecture: the largest one and the first.
    """
    from dynchunk_kernels import offline

    found = []
    for module in offline.modules():
        cases = offline.cases_of(module)
        for arch in archs:
            chosen = offline.hardest_and_common(cases, arch) if quick else cases
            found += [(case, arch) for case in chosen if arch in case.archs]
    return found


def compiled(cases: Sequence[tuple[Case, int]]) -> Iterator[Compiled]:
    """Compile them one after another."""
    from dynchunk_kernels import offline

    return (offline.inspect(case, arch) for case, arch in cases)


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
