"""``dynchunk audit``: whether recall depends on where a fact stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from dynchunk._checks import require
from dynchunk.audit import PhaseReport, plot_phases
from dynchunk.audit.report import MAX_GAP
from dynchunk.cli.common import clear_errors, make_console
from dynchunk.lab import checkpoint
from dynchunk.lab.evaluate import evaluate
from dynchunk.lab.shipped import shipped

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def audit(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Checkpoints of `dynchunk lab`, or folders of runs. Default: those shipped."
        ),
    ] = None,
    max_gap: Annotated[
        float, typer.Option(help="Largest gap between phases to accept, in [0, 1].")
    ] = MAX_GAP,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here (PNG, SVG, ..).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[int, typer.Option(help="Of the probes.")] = 0,
) -> None:
    """Measure recall by the position of a fact, and how far chance explains its differences.

    Exit code 1 if the gap of a model is above --max-gap and significant.
    """
    with clear_errors():
        require(0 <= max_gap <= 1, "max_gap", "a share in [0, 1]", max_gap)
        reports = _audit(checkpoints or shipped(), seed, show=not as_json)
        if plot is not None:
            plot_phases(reports, plot, max_gap)
    if as_json:
        targets = {name: report.as_dict(max_gap) for name, report in reports.items()}
        typer.echo(json.dumps({"max_gap": max_gap, "targets": targets}))
    else:
        make_console().print(_render(reports, max_gap), "", _verdict(reports, max_gap), sep="\n")
    if any(report.is_defect(max_gap) for report in reports.values()):
        raise typer.Exit(1)


def _audit(paths: Sequence[Path], seed: int, *, show: bool) -> dict[str, PhaseReport]:
    loaded = [checkpoint.load(path / "model.safetensors" if path.is_dir() else path)[0]
              for path in paths]  # fmt: skip
    reports: dict[str, PhaseReport] = {}
    with Progress(console=Console(stderr=True), disable=not show, transient=True) as bar:
        for path, model in zip(paths, loaded, strict=True):
            name = model.variant.name
            name = name if name not in reports else f"{name} ({path})"
            task = bar.add_task(name, total=1.0)
            found = evaluate(
                model,
                model.variant.task,
                phases=24,
                repeats=2,
                moved=0,
                flips=240,
                seed=seed,
                progress=partial(_tell, bar, task),
            )
            reports[name] = found.report()
    return reports


def _tell(bar: Progress, task: TaskID, share: float) -> None:
    bar.update(task, completed=share)


def _render(reports: Mapping[str, PhaseReport], max_gap: float) -> Table:
    table = Table(title="recall by position of the fact", title_justify="left", box=None)
    table.add_column("model")
    phases = len(next(iter(reports.values())).phases.groups)
    table.add_column(f"position mod {phases}", no_wrap=True, min_width=phases)
    for heading in ("ratio", "mean", "worst", "gap", "by chance", "p", "period", "flipped"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for name, report in reports.items():
        by_phase = report.phases
        table.add_row(
            name,
            _sparkline(by_phase.accuracy),
            f"{report.ratio:.2f}",
            f"{by_phase.mean:.1%}",
            f"{min(by_phase.accuracy):.1%}",
            f"{by_phase.gap:.1%}",
            f"{by_phase.null95:.1%}",
            f"{by_phase.p:.4f}",
            str(report.period.period or "none"),
            f"{report.flip_rate:.1%}",
            Text(report.verdict(max_gap), "red" if report.is_defect(max_gap) else "green"),
        )
    return table


def _sparkline(accuracy: Sequence[float]) -> str:
    return "".join(_BARS[min(7, int(8 * share))] for share in accuracy)


def _verdict(reports: Mapping[str, PhaseReport], max_gap: float) -> str:
    """One sentence that needs no knowledge of the words used here."""
    bad = {name: report for name, report in reports.items() if report.is_defect(max_gap)}
    if not bad:
        return (
            "Where a fact stands in the prompt made no difference above "
            f"{max_gap:.0%} to what any of these models recalls of it."
        )
    name, worst = max(bad.items(), key=lambda item: item[1].phases.gap)
    accuracy = worst.phases.accuracy
    again = f", again every {worst.period.period} tokens" if worst.period.period else ""
    steady = [other for other in reports if other not in bad]
    rest = f" {', '.join(steady)}: no such weak spot." if steady else ""
    return (
        f"{name} recalls a fact {max(accuracy):.0%} of the time at its best position and "
        f"{min(accuracy):.0%} at its worst{again}: a few tokens put in front of a prompt change "
        f"{worst.flip_rate:.0%} of its answers.{rest}"
    )
