"""Accuracy of a recall model by phase, by slot, by content, and under prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dynchunk.audit.report import PhaseReport
from dynchunk.audit.statistics import (
    GapTest,
    PeriodTest,
    fold,
    gap_test,
    period_test,
    spread_beyond_noise,
)
from dynchunk.boundaries import agreement
from dynchunk.chunks import Chunks
from dynchunk.lab.task import RecallBatch, RecallTask

SHIFTS = range(1, 8)
SPAN = 48  # positions in which a period is looked for
_SEED = 1_000_000_007  # apart from all seeds of training
_MIN_TRIALS = 100  # of a slot, to be reported


class RecallModel(Protocol):
    """What can be evaluated."""

    def answer(self, tokens: Tensor, asked_at: Tensor) -> Tensor:
        """Return the likeliest next tokens [B, Q] after ``asked_at`` [B, Q] of tokens [B, T]."""

    def chunks(self, tokens: Tensor) -> Sequence[Sequence[Chunks]]:
        """Return the views of each layer of tokens [B, T], packed; none without chunks."""


class Agreement(NamedTuple):
    """How well the boundaries of neighbouring layers agree (F1 within one token)."""

    f1: float
    chance: float


@dataclass(frozen=True)
class Evaluation:
    """What one model did.

    Parameters
    ----------
    ratio : float
        Tokens per entry, measured on the context, mean over views and layers.
    forced_share : float
        Forced cuts among the boundaries of the first layer's first view.
    natural, moved : GapTest
        By phase of the target: in all pairs at random places, and of one pair that moves token by
        token while all else stays.
    profile : GapTest
        As ``natural``, by position mod 24: for comparing strides.
    period : PeriodTest
        Found in ``natural`` without being told a stride.
    slots : GapTest or None
        By the slot of the target's first token in the first layer's first view.
    content_sd : float
        Spread of accuracy between (key, value) pairs beyond noise.
    flips : tuple of float
        Share of answers that a prefix of 1, 2, .. 7 filler tokens changes.
    agreement : Agreement or None
        Between neighbouring layers, where they have boundaries of their own.
    """

    ratio: float
    forced_share: float
    natural: GapTest
    moved: GapTest | None
    profile: GapTest
    period: PeriodTest
    slots: GapTest | None
    content_sd: float
    flips: tuple[float, ...]
    agreement: Agreement | None

    @property
    def flip_rate(self) -> float:
        """Mean over the prefixes."""
        return float(np.mean(self.flips))

    def report(self) -> PhaseReport:
        """Return what ``dynchunk audit`` shows."""
        return PhaseReport(self.profile, self.period, self.flip_rate, self.ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON can hold them."""
        return asdict(self) | {"agreement": self.agreement and self.agreement._asdict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        """Return the evaluation that :meth:`as_dict` wrote."""
        made = dict(data)
        for name in ("natural", "moved", "profile", "slots"):
            made[name] = data[name] and GapTest.from_dict(data[name])
        made["period"] = PeriodTest(**data["period"])
        made["flips"] = tuple(data["flips"])
        made["agreement"] = data["agreement"] and Agreement(**data["agreement"])
        return cls(**made)


class Trials(NamedTuple):
    """Answers to queries [N, Q], and whom they belong to."""

    correct: Tensor
    positions: Tensor
    pairs: Tensor
    slots: Tensor  #: -1 without chunks


def evaluate(
    model: RecallModel,
    task: RecallTask,
    *,
    phases: int,
    repeats: int = 4,
    moved: int = 336,
    flips: int = 480,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Evaluation:
    """Measure a model on natural placement, a moved target, and prefixes.

    Parameters
    ----------
    model : RecallModel
    task : RecallTask
    phases : int
        Modulus of ``natural`` and ``moved``: the stride, or the integer next to the ratio.
    repeats : int
        Sequences for each pair of prefixes (o1, o2): 24 x 24 x repeats in all, 16 queries each.
    moved, flips : int
        Sequences with a moved target (24 places each; 0: none), and with prefixes.
    seed : int
    progress : callable, optional
        Told the share that is done.
    """
    tell = progress or (lambda share: None)
    with torch.inference_mode():
        measured, trials = [], []
        for share, batch in _natural(task, repeats, _SEED + seed):
            views = model.chunks(batch.tokens)
            measured.append(_measure(views, batch))
            trials.append(_ask(model, batch, views))
            tell(0.35 * share)
        all_trials = Trials(*map(torch.cat, zip(*trials, strict=True)))
        moved_test = _moved(model, task, moved, phases, _SEED + seed, tell)
        flip_rates = _flips(model, task, flips, _SEED + seed, tell)
    correct = all_trials.correct.numpy()
    positions = all_trials.positions.numpy()
    ratios, forced, agreements = zip(*measured, strict=True)
    return Evaluation(
        ratio=float(np.mean(ratios)),
        forced_share=float(np.mean(forced)),
        natural=gap_test(correct.ravel(), positions.ravel() % phases),
        moved=moved_test,
        profile=gap_test(correct.ravel(), positions.ravel() % 24),
        period=period_test(fold(correct, positions, SPAN)),
        slots=_slots(all_trials),
        content_sd=spread_beyond_noise(correct, all_trials.pairs.numpy()),
        flips=flip_rates,
        agreement=_mean_agreement([a for a in agreements if a is not None]),
    )


def _natural(task: RecallTask, repeats: int, seed: int) -> Iterator[tuple[float, RecallBatch]]:
    """Draw all prefixes o1 + o2, each as often as the design has it."""
    period = task.period
    for prefix in range(2 * period - 1):
        ways = period - abs(prefix - (period - 1))
        share = (prefix + 1) / (2 * period - 1)
        yield share, task.draw(ways * repeats, seed=seed, step=prefix, prefix=prefix)


def _ask(model: RecallModel, batch: RecallBatch, views: Sequence[Sequence[Chunks]]) -> Trials:
    correct = model.answer(batch.tokens, batch.asked_at) == batch.answers
    slots = torch.full_like(batch.positions, -1)
    if views:
        rows, length = batch.tokens.shape
        at = batch.positions + length * torch.arange(rows)[:, None]
        slots = views[0][0].slots[at]
    return Trials(correct, batch.positions, batch.pairs, slots)


def _measure(
    views: Sequence[Sequence[Chunks]], batch: RecallBatch
) -> tuple[float, float, Agreement | None]:
    """Return (ratio, share of forced cuts, agreement)."""
    if not views:
        return 1.0, 0.0, None
    rows, length = batch.tokens.shape
    tokens = rows * (batch.context.stop - batch.context.start)
    entries = [
        int(((at >= batch.context.start) & (at < batch.context.stop)).sum())
        for at in (view.starts % length for layer in views for view in layer)
    ]
    pairs = [agreement(a[0], b[0]) for a, b in pairwise(views) if a[0] is not b[0]]
    same = _mean_agreement([Agreement(pair.f1, pair.f1_chance) for pair in pairs])
    return tokens / float(np.mean(entries)), views[0][0].forced_share, same


def _mean_agreement(values: Sequence[Agreement]) -> Agreement | None:
    return Agreement(*map(float, np.mean(values, axis=0))) if values else None


def _moved(
    model: RecallModel,
    task: RecallTask,
    sequences: int,
    phases: int,
    seed: int,
    tell: Callable[[float], None],
) -> GapTest | None:
    if sequences == 0:
        return None
    correct, positions = [], []
    for prefix in range(task.period):
        size = len(range(prefix, sequences, task.period))
        if size == 0:
            continue
        batch = task.draw_moved(size, seed=seed, step=prefix, prefix=prefix)
        tokens = batch.tokens.flatten(0, 1)
        last = torch.full((len(tokens), 1), tokens.shape[1] - 1)
        answers = model.answer(tokens, last).reshape(size, -1)
        correct.append(answers == batch.answers[:, None])
        positions.append(batch.positions)
        tell(0.35 + 0.35 * (prefix + 1) / task.period)
    labels = torch.cat(positions).numpy() % phases
    return gap_test(torch.cat(correct).numpy(), labels)


def _flips(
    model: RecallModel,
    task: RecallTask,
    sequences: int,
    seed: int,
    tell: Callable[[float], None],
) -> tuple[float, ...]:
    changed = torch.zeros(len(SHIFTS))
    steps = max(1, sequences // 48)
    for step in range(steps):
        batch = task.draw(48, seed=seed + 1, step=step)
        before = model.answer(batch.tokens, batch.asked_at)
        for i, shift in enumerate(SHIFTS):
            moved = task.with_prefix(batch, shift, seed=seed + step)
            after = model.answer(moved.tokens, moved.asked_at)
            changed[i] += (after != before).double().mean() / steps
        tell(0.7 + 0.3 * (step + 1) / steps)
    return tuple(changed.tolist())


def _slots(trials: Trials) -> GapTest | None:
    if bool((trials.slots < 0).any()):
        return None
    return gap_test(
        trials.correct.flatten().numpy(),
        trials.slots.flatten().numpy(),
        min_trials=_MIN_TRIALS,
    )
