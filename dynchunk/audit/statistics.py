"""Is accuracy the same at every phase? Gaps with their null, periods, spreads, intervals.

A gap between the best and the worst of several groups is never zero: noise alone makes one. Every
figure here comes with what chance would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats

from dynchunk._checks import require, require_int

DRAWS = 2_000
SIGNIFICANT = 0.05

Array = NDArray[Any]


class Interval(NamedTuple):
    """Bounds of a proportion."""

    low: float
    high: float


def wilson(correct: int, trials: int, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of a proportion; [0, 1] without trials.

    Examples
    --------
    >>> [round(bound, 3) for bound in wilson(90, 100)]
    [0.826, 0.945]
    """
    if trials == 0:
        return Interval(0.0, 1.0)
    found = stats.binomtest(correct, trials).proportion_ci(confidence, method="wilson")
    return Interval(float(found.low), float(found.high))


@dataclass(frozen=True, slots=True)
class GapTest:
    """Accuracy of groups (phases, slots), their gap, and the gap that chance gives.

    Parameters
    ----------
    groups : tuple of int
        The groups that have trials.
    correct, trials : tuple of int
        Per group.
    null95 : float
        95 % quantile of the gap if the group did not matter.
    p : float
        Chance of a gap at least as large.
    """

    groups: tuple[int, ...]
    correct: tuple[int, ...]
    trials: tuple[int, ...]
    null95: float
    p: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GapTest:
        """Return the test whose fields a JSON object holds."""
        counts = {name: tuple(data[name]) for name in ("groups", "correct", "trials")}
        return cls(**counts, null95=data["null95"], p=data["p"])

    @property
    def accuracy(self) -> list[float]:
        """Share of correct answers in each group."""
        return [c / n for c, n in zip(self.correct, self.trials, strict=True)]

    @property
    def mean(self) -> float:
        """Mean over groups, each counted equally."""
        return float(np.mean(self.accuracy))

    @property
    def gap(self) -> float:
        """Largest accuracy - smallest accuracy."""
        return max(self.accuracy) - min(self.accuracy)

    @property
    def worst(self) -> int:
        """The group of the smallest accuracy."""
        return self.groups[int(np.argmin(self.accuracy))]

    @property
    def intervals(self) -> list[Interval]:
        """Wilson's 95 % interval of each group's accuracy."""
        return [wilson(c, n) for c, n in zip(self.correct, self.trials, strict=True)]

    @property
    def is_significant(self) -> bool:
        """Whether the gap is larger than chance gives in 19 of 20 cases."""
        return self.p < SIGNIFICANT


def gap_test(
    correct: ArrayLike, groups: ArrayLike, *, min_trials: int = 1, draws: int = DRAWS, seed: int = 0
) -> GapTest:
    """Test whether accuracy differs between groups, by permutation of the answers.

    Parameters
    ----------
    correct : bool [N] or [C, K]
        Answers. [N]: independent trials, permuted over all. [C, K]: C clusters (one sequence
        each, say) of K trials, permuted within their cluster.
    groups : integers of the same shape
        For example ``positions % 24``.
    min_trials : int
        Groups of fewer trials are left out.
    draws, seed : int
        Permutations, and their seed.

    Examples
    --------
    >>> correct = [True] * 90 + [False] * 10 + [True] * 50 + [False] * 50
    >>> test = gap_test(correct, [0] * 100 + [1] * 100)
    >>> round(test.gap, 2), test.worst, test.p < 0.001, 0.05 < test.null95 < 0.2
    (0.4, 1, True, True)
    """
    hits, labels = np.asarray(correct, dtype=bool), np.asarray(groups, dtype=np.int64)
    require(hits.shape == labels.shape, "groups", f"shape {list(hits.shape)}", labels.shape)
    require(hits.ndim in (1, 2) and hits.size > 0, "correct", "trials [N] or [C, K]", hits.shape)
    trials = np.bincount(labels.ravel())
    kept = np.flatnonzero(trials >= max(1, min_trials))
    require(len(kept) > 0, "groups", f"one of at least {min_trials} trials", trials.tolist())
    counts = np.bincount(labels.ravel(), hits.ravel(), len(trials)).astype(int)
    rng = np.random.default_rng(seed)
    if hits.ndim == 1:
        in_kept = int(counts[kept].sum())
        null = rng.multivariate_hypergeometric(trials[kept], in_kept, draws)
    else:
        null = np.stack([_permuted(hits, labels, len(trials), rng) for _ in range(draws)])[:, kept]
    rates = null / trials[kept]
    gaps = np.ptp(rates, axis=1)
    observed = np.ptp(counts[kept] / trials[kept])
    return GapTest(
        tuple(kept.tolist()),
        tuple(counts[kept].tolist()),
        tuple(trials[kept].tolist()),
        float(np.quantile(gaps, 0.95)),
        _share_at_least(gaps, observed),
    )


@dataclass(frozen=True, slots=True)
class PeriodTest:
    """The dominant period of accuracy over position.

    Parameters
    ----------
    period : int or None
        None: no period stands out from chance.
    p : float
        Chance that any period stands out as much.
    power : float
        Share of the detrended variance that a profile of this period explains.
    """

    period: int | None
    p: float
    power: float


def period_test(
    accuracy: ArrayLike, *, alpha: float = 0.01, draws: int = DRAWS, seed: int = 0
) -> PeriodTest:
    """Find the period of accuracy over neighbouring positions, without being told the stride.

    The profile is detrended by a quadratic. For each period that divides the span, the lines of
    the periodogram at that period and its harmonics add up to the share of variance it explains;
    the share that is least likely by chance (F test) wins, so that a period is preferred to its
    own multiples. The winner is tested against permutations of the detrended profile.

    Parameters
    ----------
    accuracy : floating [N]
        Per position mod N, N a multiple of all periods in question: 24 or, better, 48.
    alpha : float
        Level at which a period is reported.
    draws, seed : int
        Permutations, and their seed.

    Examples
    --------
    >>> noise = np.random.default_rng(0).normal(0, 0.01, 48)
    >>> profile = 0.9 - 0.3 * (np.arange(48) % 6 == 5) + noise
    >>> period_test(profile).period, period_test(0.9 + noise).period
    (6, None)
    """
    profile = np.asarray(accuracy, dtype=float)
    ok = profile.ndim == 1 and len(profile) >= 8 and bool(np.isfinite(profile).all())
    require(ok, "accuracy", "finite values [N], N >= 8", profile.shape)
    span = len(profile)
    periods = [period for period in range(2, span // 2 + 1) if span % period == 0]
    require(len(periods) > 0, "accuracy", "a span that some period divides", span)
    flat = _detrend(profile[None])
    if np.ptp(flat) < 1e-12:
        return PeriodTest(None, 1.0, 0.0)
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.broadcast_to(flat, (draws, span)), axis=1)
    power = _explained(flat, periods)
    evidence = _log_p(power, periods, span)[0]
    null = _log_p(_explained(_detrend(shuffled), periods), periods, span).min(axis=1)
    best = int(np.argmin(evidence))
    p = _share_at_least(-null, -evidence[best])
    return PeriodTest(periods[best] if p < alpha else None, p, float(power[0, best]))


def fold(correct: ArrayLike, positions: ArrayLike, span: int) -> Array:
    """Return accuracy by position mod ``span``, NaN where there is no trial.

    Examples
    --------
    >>> fold([True, False, True, True], [0, 2, 1, 4], 2)
    array([0.66666667, 1.        ])
    """
    require_int("span", span, 1)
    labels = np.asarray(positions).ravel() % span
    hits = np.bincount(labels, np.asarray(correct, dtype=float).ravel(), span)
    with np.errstate(invalid="ignore"):
        return np.asarray(hits / np.bincount(labels, minlength=span))


def spread_beyond_noise(correct: ArrayLike, groups: ArrayLike) -> float:
    """Return the standard deviation of accuracy between groups that noise does not explain.

    The random-effects estimate of one-way analysis of variance; 0 if groups differ no more than
    trials within a group do.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> of_group = rng.choice([0.5, 0.9], 400)
    >>> correct = rng.random((400, 50)) < of_group[:, None]
    >>> round(spread_beyond_noise(correct, np.arange(400)[:, None].repeat(50, 1)), 1)
    0.2
    """
    hits = np.asarray(correct, dtype=float).ravel()
    _, labels = np.unique(np.asarray(groups).ravel(), return_inverse=True)
    sizes = np.bincount(labels)
    n, k = len(hits), len(sizes)
    if k < 2 or n <= k:
        return 0.0
    rates = np.bincount(labels, hits) / sizes
    between = float((sizes * (rates - hits.mean()) ** 2).sum()) / (k - 1)
    within = float(((hits - rates[labels]) ** 2).sum()) / (n - k)
    typical = (n - float((sizes**2).sum()) / n) / (k - 1)
    return float(np.sqrt(max(0.0, (between - within) / typical)))


def _permuted(hits: Array, labels: Array, groups: int, rng: np.random.Generator) -> Array:
    return np.bincount(labels.ravel(), rng.permuted(hits, axis=1).ravel(), groups)


def _share_at_least(null: Array, observed: float) -> float:
    """Return the p value of ``observed``, itself one of the draws; ties by rounding count."""
    return float((1 + (null >= observed - 1e-9).sum()) / (1 + len(null)))


def _detrend(profiles: Array) -> Array:
    x = np.linspace(-1, 1, profiles.shape[1])
    basis, _ = np.linalg.qr(np.stack([np.ones_like(x), x, x**2], axis=1))
    return np.asarray(profiles - profiles @ basis @ basis.T)


def _explained(profiles: Array, periods: list[int]) -> Array:
    """Share of variance that each period and its harmonics explain, [.., periods]."""
    _, lines = signal.periodogram(profiles, detrend=False, axis=1)
    span, total = profiles.shape[1], lines.sum(axis=1)
    combs = [lines[:, span // period :: span // period].sum(axis=1) for period in periods]
    return np.asarray(np.stack(combs, axis=1) / total[:, None])


def _log_p(power: Array, periods: list[int], span: int) -> Array:
    """Log of the F test's p value for each period's share of variance."""
    dof = np.array(periods) - 1
    rest = span - 1 - dof
    f = (power / dof) / (np.maximum(1 - power, 1e-12) / rest)
    return np.asarray(stats.f.logsf(f, dof, rest))
