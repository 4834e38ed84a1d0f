"""``dynchunk lab``: train one recall model, or run the whole study."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dynchunk._checks import require, require_int
from dynchunk.cli.common import clear_errors, make_console
from dynchunk.lab.evaluate import Evaluation
from dynchunk.lab.policies import POLICIES, VIEWS
from dynchunk.lab.shipped import NAMES, ship
from dynchunk.lab.table import ROWS, Row, is_finished, run_row, runs_of, summary, write_table
from dynchunk.lab.task import TASKS
from dynchunk.lab.train import OPTIMIZERS, Training
from dynchunk.lab.variants import Variant, make_variant

lab = typer.Typer(no_args_is_help=True, help="Train small recall models and compare them.")

Folder = Annotated[Path, typer.Option(help="Where runs are kept.")]
Tell = Callable[[str, float], None]

_HEADINGS = {
    "variant": "variant",
    "seed": "seed",
    "ratio": "ratio",
    "mean": "mean",
    "worst_phase": "worst phase",
    "gap": "gap",
    "gap_null95": "chance",
    "gap_p": "p",
    "moved_gap": "gap, moved",
    "period": "period",
    "slot_gap": "slot gap",
    "content_sd": "content SD",
    "flipped": "flipped",
}


@lab.command()
def train(
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")],
    stride: Annotated[int, typer.Option(help="Stride of a grid, or target ratio.")] = 4,
    view: Annotated[str, typer.Option(help=f"Second view: {', '.join(VIEWS)}.")] = "one",
    overlap: Annotated[bool, typer.Option(help="Pool the chunk before too.")] = False,
    per_layer: Annotated[bool, typer.Option(help="Boundaries of each layer's own.")] = False,
    ratio: Annotated[
        float | None, typer.Option(help="Calibrate surprisal or hash boundaries to it.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest content chunk.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "even",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 700,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 32,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 4e-3,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "adamw",
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    folder: Folder = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a recall model, go on if it was interrupted, and evaluate it by phase."""
    torch.set_num_threads(1)
    with clear_errors():
        variant = make_variant(
            policy,
            stride=stride,
            view=view,
            overlap=overlap,
            per_layer=per_layer,
            ratio=ratio,
            max_length=max_length,
            layers=layers,
            task=task,
        )
        training = Training(steps, batch, lr, optimizer, seed=seed)
        with _bar(not as_json) as bar:
            found = run_row(variant, training, folder, _teller(bar, variant.name))
    line = summary(variant.name, seed, found)
    if as_json:
        typer.echo(json.dumps(line))
    else:
        make_console().print(_render([line]))
        typer.echo(f"checkpoint: {folder / variant.name / f'seed-{seed}' / 'model.safetensors'}")


@lab.command()
def table(
    folder: Folder = Path("runs"),
    only: Annotated[
        list[str] | None, typer.Option(help="Rows of this name, * for anything; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 700,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each row, at most.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side, one thread each.")] = 1,
    finished: Annotated[bool, typer.Option(help="Run nothing: only what has been run.")] = False,
) -> None:
    """Run every row of the study and write table.json, table.csv and table.png.

    A finished run is not run again, an interrupted one goes on where it was.
    """
    torch.set_num_threads(1)
    with clear_errors():
        require_int("jobs", jobs, 1)
        rows = _chosen(only, seeds)
        runs = runs_of(rows, Training(steps))
        if finished:
            runs = [run for run in runs if is_finished(*run, folder)]
            require(len(runs) > 0, "folder", "at least one finished run", folder)
        with _bar(True) as bar:
            found = _run_all(runs, folder, jobs, bar)
        order = {row.variant.name: i for i, row in enumerate(rows)}
        found.sort(key=lambda result: (order[result[0]], result[1]))
        write_table(found, folder)
    make_console().print(_render([summary(*result) for result in found]))
    typer.echo(f"written: {folder}/table.json, table.csv, table.png")


@lab.command("ship")
def ship_checkpoints(
    folder: Folder = Path("runs"),
    jobs: Annotated[int, typer.Option(help="Runs side by side, one thread each.")] = 1,
) -> None:
    """Train the shipped checkpoints where they are missing, and copy them into the package."""
    table(folder, list(NAMES), seeds=1, jobs=jobs)
    with clear_errors():
        ship(folder)
    typer.echo(f"shipped: {', '.join(NAMES)}")


Result = tuple[str, int, Evaluation]


def _chosen(only: Sequence[str] | None, seeds: int | None) -> list[Row]:
    named = {row.variant.name: row for row in ROWS}
    patterns = only or ["*"]
    rows = [
        row
        for name, row in named.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    require(len(rows) > 0, "only", f"a pattern of one of {', '.join(named)}", only)
    if seeds is None:
        return rows
    require_int("seeds", seeds, 1)
    return [Row(row.policy, row.options, min(row.seeds, seeds)) for row in rows]


def _run_all(
    runs: Sequence[tuple[Variant, Training]], folder: Path, jobs: int, bar: Progress
) -> list[Result]:
    total = bar.add_task(f"{len(runs)} runs", total=len(runs), status="")
    if jobs == 1:
        results = []
        for variant, training in runs:
            name = f"{variant.name}, seed {training.seed}"
            found = run_row(variant, training, folder, _teller(bar, name))
            results.append((variant.name, training.seed, found))
            bar.advance(total)
        return results
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(_run_one, *run, folder) for run in runs]
        try:
            for done in as_completed(pending):
                bar.update(total, advance=1, status=f"{done.result()[0]} done")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in pending]


def _run_one(variant: Variant, training: Training, folder: Path) -> Result:
    torch.set_num_threads(1)
    return variant.name, training.seed, run_row(variant, training, folder)


@contextmanager
def _bar(is_shown: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as bar:
        yield bar


def _teller(bar: Progress, name: str) -> Tell:
    task = bar.add_task(name, total=1.0, status="")

    def tell(status: str, share: float) -> None:
        bar.update(task, completed=share, status=status, visible=share < 1)

    return tell


def _render(lines: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=None, title="recall in %, gaps in points", title_justify="left")
    for key, heading in _HEADINGS.items():
        shown.add_column(heading, justify="left" if key == "variant" else "right")
    for line in lines:
        cells = ["-" if line[key] is None else str(line[key]) for key in _HEADINGS]
        shown.add_row(*cells)
    return shown
