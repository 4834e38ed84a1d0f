"""Reach a target ratio: choose radius and threshold on a sample of scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.boundaries.rule import BoundaryRule
from dynchunk.chunks import Kind, SequenceOffsets


def calibrate(
    rule: BoundaryRule,
    sample: Tensor,
    ratio: float,
    cu_seqlens: SequenceOffsets | None = None,
    *,
    tolerance: float = 0.02,
) -> BoundaryRule:
    """Return ``rule`` with the radius and threshold that reach ``ratio`` on a sample.

    The radius is the largest one, up to the rule's own, whose maxima are dense enough; then the
    threshold is found by bisection over the scores of the sample's content boundaries. (The ratio
    never falls as the threshold rises: forced cuts never outnumber the boundaries they replace.)

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
        Relative error that is accepted on the sample.

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
    start = replace(rule, threshold=-torch.inf)
    dense = start(sample, cu_seqlens)
    while dense.ratio > ratio and start.radius > m - 1:
        start = replace(start, radius=start.radius - 1)
        dense = start(sample, cu_seqlens)

    def ratio_of(candidate: BoundaryRule) -> float:
        return candidate(sample, cu_seqlens).ratio

    peaks = torch.unique(sample[dense.starts[dense.kinds == Kind.CONTENT]].double())
    thresholds = [-torch.inf, *peaks.tolist(), torch.inf]
    low, high = 0, len(thresholds) - 1  # ratio_of(low) <= ratio, unless even that is too sparse
    while high - low > 1:
        middle = (low + high) // 2
        if ratio_of(replace(start, threshold=thresholds[middle])) <= ratio:
            low = middle
        else:
            high = middle
    candidates = [replace(start, threshold=thresholds[i]) for i in (low, high)]
    reached = {candidate: ratio_of(candidate) for candidate in candidates}
    best = min(candidates, key=lambda candidate: abs(reached[candidate] - ratio))
    if not abs(reached[best] - ratio) <= tolerance * ratio:
        near = " and ".join(f"{value:.2f}" for value in sorted(reached.values()))
        raise ValueError(
            f"ratio: expected one that this rule can reach within {tolerance:.1%} on the sample, "
            f"got {ratio}; the nearest are {near}. Scores that tie move many boundaries at once "
            "(add a small HashScore); a ratio near max_length needs a larger max_length, a small "
            "one a smaller min_length."
        )
    return best
