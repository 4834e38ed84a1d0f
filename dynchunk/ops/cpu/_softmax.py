"""A softmax over rows that come in tiles: running maximum (peak), sum and weighted sum.

Logits, peaks and sinks are in units that make them exponents of 2.
"""

from __future__ import annotations

import numpy as np

from dynchunk.ops.cpu import fast, inline
from dynchunk.ops.cpu._numeric import exp2, highest

LN_2 = np.float32(0.6931471805599453)
NONE = np.float32(-np.inf)  # the peak of nothing


@fast
def base_of(peak):
    """Return what is subtracted from logits: their maximum, if there is one."""
    return peak if peak != NONE else np.float32(0)


@inline
def absorb_row(logits, n, peak, total, weighted):
    """Turn ``n`` logits into weights; return the new (peak, total).

    Weights are zero from n on. ``weighted`` [D_v] is made to fit the new peak.
    """
    new = highest(logits[:n])
    if new <= peak:  # not where it is NaN
        new = peak
    base = base_of(new)
    factor = exp2(peak - base)
    added = np.float32(0)
    for j in range(n):
        weight = exp2(logits[j] - base)
        logits[j] = weight
        added += weight
    logits[n:] = 0
    if factor != 1:
        for d in range(weighted.size):
            weighted[d] *= factor
    return new, total * factor + added


@fast
def merge(peaks, totals, weighted, sink, out):
    """Put parts together in their order, those of a negative total left out.

    ``out`` [D_v] gets the mean of the values, zero if there is nothing. Return the natural log of
    the softmax's denominator.
    """
    peak = sink
    for part in range(peaks.size):
        if totals[part] >= 0 and not (peaks[part] <= peak):
            peak = peaks[part]
    base = base_of(peak)
    total = exp2(sink - base)
    out[:] = 0
    for part in range(peaks.size):
        if not (totals[part] < 0):
            factor = exp2(peaks[part] - base)
            total += totals[part] * factor
            for d in range(out.size):
                out[d] += weighted[part, d] * factor
    if total != 0:
        for d in range(out.size):
            out[d] /= total
    return (base + np.log2(total)) * LN_2
