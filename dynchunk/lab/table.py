"""The controlled study: its rows, run one by one and kept, and its table and figure."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynchunk._checks import optional_import, require
from dynchunk.lab.evaluate import Evaluation, evaluate
from dynchunk.lab.policies import VIEWS
from dynchunk.lab.train import Progress, Training, train
from dynchunk.lab.variants import Variant, make_variant

RESULT = "result.json"
HEADLINE_SEEDS = 3


@dataclass(frozen=True)
class Row:
    """A variant by its options, and how many seeds it is run with.

    Examples
    --------
    >>> Row("fixed", {"stride": 8}).variant.name
    'fixed-8'
    """

    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    seeds: int = 1

    @property
    def variant(self) -> Variant:
        """The variant of this row."""
        return make_variant(self.policy, **self.options)


def _rows() -> tuple[Row, ...]:
    two, overlap = {"view": "moved"}, {"overlap": True}
    midpoints = {"view": "midpoints"}
    return (
        Row("full"),
        Row("fixed", {"stride": 1} | overlap, seeds=HEADLINE_SEEDS),  # all tokens are entries
        Row("fixed", seeds=HEADLINE_SEEDS),
        *(Row("fixed", {"stride": stride}) for stride in (2, 6, 8, 12)),
        *(Row(name) for name in ("mean", "no-slot-bias", "no-rope", "random-offset")),
        Row("fixed", overlap, seeds=HEADLINE_SEEDS),
        Row("fixed", two, seeds=HEADLINE_SEEDS),
        Row("fixed", two | overlap),
        Row("staggered-layers"),
        *_content_rows("class", headline=("one", "midpoints")),
        Row("surprisal", {"ratio": 3.84}, seeds=HEADLINE_SEEDS),
        Row("surprisal", {"ratio": 3.84} | midpoints),
        *_content_rows("hash"),
        *_content_rows("router"),
        Row("router", {"per_layer": True}),
        *_content_rows("learned", headline=("midpoints",)),
        Row("learned", {"per_layer": True}),
        *_uneven_rows("uneven", seeds=HEADLINE_SEEDS),
        *_uneven_rows("uneven-keys-2"),
        *_uneven_rows("uneven-run"),
        Row("class", {"task": "uneven", "layers": 3}),
        Row("fixed", {"task": "uneven", "layers": 3} | two),
        Row("full", {"task": "uneven"}),
        Row("fixed", {"task": "uneven"}),
        Row("hash", {"task": "uneven"} | midpoints),
        Row("router", {"task": "uneven", "stride": 5}),
    )


def _content_rows(score: str, headline: Collection[str] = ()) -> Iterable[Row]:
    views = [view for view in VIEWS if (score, view) != ("class", "second")]  # one class alone
    for view in views:
        yield Row(score, {"view": view}, HEADLINE_SEEDS if view in headline else 1)
    for view in views:
        yield Row(score, {"view": view, "overlap": True})


def _uneven_rows(task: str, seeds: int = 1) -> Iterable[Row]:
    yield Row("class", {"task": task}, seeds)
    yield Row("surprisal", {"task": task, "ratio": 4.5}, seeds)
    yield Row("fixed", {"task": task, "view": "moved"}, seeds)
    yield Row("learned", {"task": task, "view": "midpoints"})


#: All rows of the study.
ROWS = _rows()


def run_row(
    variant: Variant,
    training: Training,
    folder: Path,
    tell: Callable[[str, float], None] | None = None,
) -> Evaluation:
    """Train and evaluate one variant with one seed, or read what a finished run left.

    Parameters
    ----------
    variant : Variant
    training : Training
    folder : path
        Of all runs; this one gets ``folder/<name>/seed-<seed>``.
    tell : callable, optional
        Told what goes on, and the share that is done.
    """
    home = folder / variant.name / f"seed-{training.seed}"
    say = tell or (lambda what, share: None)

    def training_step(progress: Progress) -> None:
        what = f"loss {progress.loss:.2f}, accuracy {progress.accuracy:.0%}"
        say(what, 0.8 * progress.step / training.steps)

    settings = {"variant": variant.as_dict(), "training": asdict(training)}
    if (home / RESULT).exists():
        kept = json.loads((home / RESULT).read_text())
        same = {key: kept.get(key) for key in settings} == settings
        require(same, f"{home / RESULT}", "a run of these settings (or another folder)", variant)
        return Evaluation.from_dict(kept["evaluation"])
    model = train(variant, training, home, training_step)
    found = evaluate(
        model,
        variant.task,
        phases=variant.phases,
        progress=lambda share: say("evaluating", 0.8 + 0.2 * share),
    )
    (home / RESULT).write_text(json.dumps(settings | {"evaluation": found.as_dict()}) + "\n")
    return found


def is_finished(variant: Variant, training: Training, folder: Path) -> bool:
    """Return whether :func:`run_row` would read the result instead of training."""
    return (folder / variant.name / f"seed-{training.seed}" / RESULT).exists()


def summary(name: str, seed: int, found: Evaluation) -> dict[str, Any]:
    """Return a line of the table: shares in percent, gaps in points."""
    natural, moved, slots = found.natural, found.moved, found.slots
    return {
        "variant": name,
        "seed": seed,
        "ratio": round(found.ratio, 3),
        "mean": _percent(natural.mean),
        "worst_phase": _percent(min(natural.accuracy)),
        "gap": _percent(natural.gap),
        "gap_null95": _percent(natural.null95),
        "gap_p": round(natural.p, 4),
        "moved_mean": None if moved is None else _percent(moved.mean),
        "moved_gap": None if moved is None else _percent(moved.gap),
        "moved_null95": None if moved is None else _percent(moved.null95),
        "moved_p": None if moved is None else round(moved.p, 4),
        "period": found.period.period,
        "period_p": round(found.period.p, 4),
        "slot_gap": None if slots is None else _percent(slots.gap),
        "slot_null95": None if slots is None else _percent(slots.null95),
        "content_sd": _percent(found.content_sd),
        "flipped": _percent(found.flip_rate),
        "forced": _percent(found.forced_share),
        "layer_f1": None if found.agreement is None else round(found.agreement.f1, 3),
        "layer_f1_chance": None if found.agreement is None else round(found.agreement.chance, 3),
    }


def write_table(results: Sequence[tuple[str, int, Evaluation]], folder: Path) -> None:
    """Write ``table.json`` (all figures), ``table.csv`` (a line a run) and ``table.png``."""
    require(len(results) > 0, "results", "at least one finished run", results)
    runs = [{"variant": v, "seed": seed} | found.as_dict() for v, seed, found in results]
    (folder / "table.json").write_text(json.dumps(runs, indent=1) + "\n")
    lines = [summary(*result) for result in results]
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    _draw(results, folder / "table.png")


def runs_of(rows: Sequence[Row], training: Training) -> list[tuple[Variant, Training]]:
    """Return every run of the rows: first seeds first, so that the table fills evenly."""
    most = max((row.seeds for row in rows), default=0)
    return [
        (row.variant, replace(training, seed=training.seed + seed))
        for seed in range(most)
        for row in rows
        if seed < row.seeds
    ]


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _draw(results: Sequence[tuple[str, int, Evaluation]], path: Path) -> None:
    """Draw a bar from the worst phase to the best for each variant, and the mean."""
    matplotlib = optional_import("matplotlib", extra="audit")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for name, _, _ in results))
    height = 0.24 * len(names) + 1.2
    figure, panel = plt.subplots(figsize=(8, height), layout="constrained")
    for y, name in enumerate(reversed(names)):
        found = [evaluation for variant, _, evaluation in results if variant == name]
        accuracy = 100 * np.mean([run.natural.accuracy for run in found], axis=0)
        chance = 100 * np.mean([run.natural.null95 for run in found])
        color = "#c2532f" if np.ptp(accuracy) > max(2 * chance, 2) else "#3b6ea8"
        panel.plot([accuracy.min(), accuracy.max()], [y, y], color=color, linewidth=6, alpha=0.45)
        panel.plot(accuracy.mean(), y, "o", color=color, markersize=5)
        ratio = np.mean([run.ratio for run in found])
        panel.text(101.5, y, f"{ratio:.2f}", va="center", fontsize=7)
    panel.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
    panel.set(xlim=(-1, 108), ylim=(-0.7, len(names) - 0.3))
    panel.set_xlabel("recall in %: mean (dot), from the worst phase to the best (bar); ratio right")
    panel.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
