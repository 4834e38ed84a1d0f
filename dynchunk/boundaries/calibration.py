"""Reach a target ratio: choose radius and threshold on a sample of scores."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.boundaries.rule import BoundaryRule
from dynchunk.chunks import Kind, SequenceOffsets

_GOOD = 0.02  # relative error at which the search stops


def calibrate(
    rule: BoundaryRule,
    sample: Tensor,
    ratio: float,
    cu_seqlens: SequenceOffsets | None = None,
    *,
    tolerance: float = _GOOD,
) -> BoundaryRule:
    """Return ``rule`` with the radius and threshold that reach ``ratio`` on a sample.

    From the rule's own radius down, the threshold is found by bisection over the scores of the
    sample's content boundaries, until one comes within 2 %. (The ratio never falls as the
    threshold rises: forced cuts never outnumber the boundaries they replace.)

    Parameters
    ----------
    rule : BoundaryRule
        Its ``min_length``, ``max_length`` and ``ladder`` are kept.
    sample : floating tensor [T]
        Scores of text like the one to come; some thousand chunks for a steady result.
    ratio : float
        Tokens per entry, between ``min_length`` and ``max_length``.
    cu_seqlens : offsets [B+1] of the sample's sequences, optional
    tolerance : float
        Relative error that is accepted on the sample, where no radius comes within 2 %.

    Raises
    ------
    ValueError
        The ratio cannot be reached; the message says how near the sample comes.

    Examples
    --------
    >>> sample = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    >>> rule = calibrate(BoundaryRule(radius=2, max_length=32), sample, ratio=6)
    >>> rule.radius, round(rule(sample).ratio, 1)
    (2, 6.0)
    """
    m, M = rule.min_length, rule.max_length
    require(m <= ratio <= M, "ratio", f"a number in [min_length, max_length] = [{m}, {M}]", ratio)
    found: dict[BoundaryRule, float] = {}
    for radius in range(rule.radius, m - 2, -1):
        found |= _bisect(replace(rule, radius=radius), sample, ratio, cu_seqlens)
        best = min(found, key=lambda candidate: abs(found[candidate] - ratio))
        if abs(found[best] - ratio) <= _GOOD * ratio:
            return best
    if abs(found[best] - ratio) <= tolerance * ratio:
        return best
    below = max((value for value in found.values() if value <= ratio), default=math.nan)
    above = min((value for value in found.values() if value >= ratio), default=math.nan)
    raise ValueError(
        f"ratio: expected one that this rule can reach within {tolerance:.1%} on the sample, got "
        f"{ratio}; the nearest are {below:.2f} and {above:.2f}. Scores that tie move many "
        "boundaries at once (add a small HashScore); a ratio near max_length needs a larger "
        "max_length, a small one a smaller min_length."
    )


def _bisect(
    rule: BoundaryRule, sample: Tensor, ratio: float, cu_seqlens: SequenceOffsets | None
) -> dict[BoundaryRule, float]:
    """Return the rules of the two thresholds around ``ratio``, with the ratios they reach."""

    def ratio_of(threshold: float) -> float:
        return replace(rule, threshold=threshold)(sample, cu_seqlens).ratio

    dense = replace(rule, threshold=-math.inf)(sample, cu_seqlens)
    peaks = torch.unique(sample[dense.starts[dense.kinds == Kind.CONTENT]].double())
    thresholds = [-math.inf, *peaks.tolist(), math.inf]
    low, high = 0, len(thresholds) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if ratio_of(thresholds[middle]) <= ratio:
            low = middle
        else:
            high = middle
    return {
        replace(rule, threshold=threshold): ratio_of(threshold)
        for threshold in (thresholds[low], thresholds[high])
    }
