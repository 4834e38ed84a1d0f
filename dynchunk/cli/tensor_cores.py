"""``dynchunk bench tensor-cores``: what the kernels do with a GPU, also where there is none."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dynchunk._checks import optional_import, require, require_int
from dynchunk.bench import accounting, measured, offline
from dynchunk.cli.common import clear_errors, make_console

if TYPE_CHECKING:  # it needs triton
    from dynchunk_kernels.offline import Compiled

_TEXT = Path(argparse.__file__)  # some text that is on every machine


class Part(StrEnum):
    """Parts of the bench of tensor cores."""

    OFFLINE = "offline"
    ACCOUNTING = "accounting"
    MEASURED = "measured"


def tensor_cores(
    only: Annotated[
        list[Part] | None, typer.Option(help="Only this part; may be repeated.")
    ] = None,
    arch: Annotated[
        list[int] | None,
        typer.Option(help="Compute capability, 10 x major + minor; may be repeated."),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Two configurations of each kernel, the largest and the first.")
    ] = False,
    text: Annotated[Path, typer.Option(help="A text to count on, bytes as tokens.")] = _TEXT,
    workers: Annotated[
        int, typer.Option("--jobs", help="Compile in as many processes.")
    ] = os.cpu_count() or 1,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON object here, - for stdout.")
    ] = None,
) -> None:
    """Show how the kernels use tensor cores: by their machine code, by count, and measured.

    The machine code is that for GPUs of compute capability 8.0, 9.0 and 10.0; none is needed.
    Exit code 1 if a configuration spills in a loop, does not fit or multiplies matrices without
    tensor cores.
    """
    parts = only or list(Part)
    found: dict[str, list[Any]] = {"offline": [], "accounting": [], "measured": []}
    quiet = as_json == Path("-")
    console = make_console()
    with clear_errors():
        if Part.OFFLINE in parts:
            found["offline"] = _compile(arch or [80, 90, 100], workers, quick=quick, show=not quiet)
        if Part.ACCOUNTING in parts:
            require(text.is_file(), "--text", "a file", text)
            found["accounting"] = accounting.account(text.read_bytes(), offline.attend_tiles())
        if Part.MEASURED in parts and measured.is_possible():
            found["measured"] = list(measured.measure())
        if as_json is not None:
            _write(found, as_json)
    if not quiet:
        for part in parts:
            console.print(_render(part, found[part]))
    if not all(row.ok for row in found["offline"]):
        raise typer.Exit(1)


def _compile(archs: Sequence[int], workers: int, *, quick: bool, show: bool) -> list[Compiled]:
    optional_import("triton", extra="triton")
    from dynchunk_kernels.offline import LIMITS

    require_int("--jobs", workers, 1)
    for arch in archs:
        require(arch in LIMITS, "--arch", f"one of {', '.join(map(str, LIMITS))}", arch)
    jobs = offline.jobs(archs, quick=quick)
    progress = track(
        offline.compiled(jobs, workers),
        "compiling",
        total=len(jobs),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton, on defaults of its next version
        return list(progress)


def _write(found: dict[str, list[Any]], path: Path) -> None:
    rows = {
        "offline": [offline.as_row(row) for row in found["offline"]],
        "accounting": [row._asdict() for row in found["accounting"]],
        "measured": [row._asdict() for row in found["measured"]],
    }
    if path == Path("-"):
        typer.echo(json.dumps(rows))
    else:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def _render(part: Part, rows: list[Any]) -> Table | str:
    if part is Part.MEASURED and not rows:
        return "measured on a GPU\nnot measured: there is no CUDA device here\n"
    if part is Part.OFFLINE:
        return _offline_table(rows)
    return _accounting_table(rows) if part is Part.ACCOUNTING else _measured_table(rows)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _offline_table(rows: list[Compiled]) -> Table:
    table = _table(
        "machine code of the kernels",
        ("kernel", "configuration"),
        (
            *("sm", "registers", "spills", "shared", "warps", "tensor cores"),
            *("16-byte loads", "FLOP/B", ""),
        ),
    )
    for row in rows:
        table.add_row(
            row.kernel.removesuffix("_kernel"),
            row.config,
            str(row.arch),
            str(row.registers),
            f"{row.spill_bytes} B",
            f"{row.shared_bytes / 1024:.0f} of {row.shared_limit // 1024} KiB",
            f"{row.resident_warps} of 64",
            ", ".join(f"{n} {kind}" for kind, n in row.mma.items()) or "-",
            f"{row.wide_loads} of {row.global_loads}",
            f"{row.intensity:.3g}",
            Text(row.why or "ok", "green" if row.ok else "red"),
            style="" if row.ok else "red",
        )
    return table


def _accounting_table(rows: list[accounting.Share]) -> Table:
    headings = ("policy", "work", "layout", "tile")
    table = _table("useful share of what tensor cores multiply", headings, ("ratio", "useful"))
    for row in rows:
        cells = (row.policy, row.work, row.layout, row.tile)
        table.add_row(*cells, f"{row.ratio:.2f}", f"{row.useful_share:.1%}")
    return table


def _measured_table(rows: list[measured.Measurement]) -> Table:
    headings = ("operation", "shape", "pass")
    table = _table("measured on a GPU", headings, ("ms", "TFLOP/s", "GB/s", "of the ceiling"))
    for row in rows:
        table.add_row(
            row.operation,
            row.shape,
            row.direction,
            f"{row.milliseconds:.3f}",
            "" if row.tflops is None else f"{row.tflops:.0f}",
            "" if row.gigabytes is None else f"{row.gigabytes:.0f}",
            "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}",
        )
    return table
