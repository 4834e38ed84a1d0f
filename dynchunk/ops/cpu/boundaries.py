"""The boundary rule in numba: one definition, used on whole sequences and token by token.

:func:`content_boundaries` finds the content boundaries of a range of tokens and :func:`place` puts
the forced cuts between them. :func:`boundaries` runs both over packed sequences,
:func:`advance` over the tokens that a stream has just received.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dynchunk.chunks import NEVER, Kind
from dynchunk.ops.boundaries import RuleParameters
from dynchunk.ops.cpu import jit

Array = NDArray[np.generic]

_START, _CONTENT, _FORCED = int(Kind.START), int(Kind.CONTENT), int(Kind.FORCED)
_NEVER = NEVER
_BLOCK = 2048  # tokens whose scores and window maxima stay in the first-level cache


def boundaries(
    scores: Array, cu_seqlens: Array, p: RuleParameters
) -> tuple[Array, Array, Array] | None:
    """Return (starts, visible_from, kinds), or None if a score is NaN."""
    if _has_nan(scores):
        return None
    threshold = lowest_passing(p.threshold, scores.dtype)
    B = len(cu_seqlens) - 1
    spacing = p.min_length if p.ladder else p.radius + 1
    # numpy's own large arrays come on huge pages where the system has them, numba's do not.
    content = np.empty(len(scores) // spacing + B + 1, np.int64)
    cu_content = np.zeros(B + 1, np.int64)
    rule = (p.radius, threshold, p.min_length, p.max_length, p.ladder)
    total = _find(scores, cu_seqlens, rule, content, cu_content)
    starts, visible_from = np.empty(total, np.int64), np.empty(total, np.int64)
    kinds = np.empty(total, np.int8)
    _fill(content, cu_content, cu_seqlens, rule, starts, visible_from, kinds)
    return starts, visible_from, kinds


def lowest_passing(threshold: float, dtype: np.dtype) -> np.floating:
    """Return the lowest number of ``dtype`` that is >= threshold, so that comparing stays exact."""
    low = dtype.type(threshold)
    return low if float(low) >= threshold else np.nextafter(low, dtype.type(math.inf))


@jit
def _has_nan(scores):
    found = False
    for i in range(scores.size):  # no early exit: it would keep the loop from being vectorised
        found |= scores[i] != scores[i]
    return found


@jit
def _pairwise_max(a, b, out):
    for i in range(out.size):
        out[i] = a[i] if a[i] > b[i] else b[i]


@jit
def _mark_maxima(x, left, right, threshold, out):
    for i in range(out.size):
        out[i] = (x[i] > left[i]) & (x[i] >= right[i]) & (x[i] >= threshold)


@jit
def _mark_high(x, threshold, out):
    for i in range(out.size):
        out[i] = x[i] >= threshold


@jit
def _is_maximum(scores, first, t, stop, threshold):
    high = scores[t]
    if high < threshold:
        return False
    for u in range(t - 1, first - 1, -1):
        if scores[u] >= high:
            return False
    for u in range(t + 1, stop):
        if scores[u] > high:
            return False
    return True


@jit
def _maxima(scores, begin, lo, hi, radius, threshold, out):
    """Write the maxima of a radius in [lo, hi) to ``out``, return their number.

    The caller sees to it that begin <= lo and that token hi - 1 + radius exists. Window maxima
    come from doubling: log2(radius) passes, whatever the radius, all of them vectorised.
    """
    count = 0
    if hi - lo <= 2:  # a stream's single tokens: nothing to share between windows
        for t in range(lo, hi):
            if _is_maximum(scores, max(begin, t - radius), t, t + radius + 1, threshold):
                out[count] = t
                count += 1
        return count
    block = min(max(_BLOCK, 4 * radius), max(hi - lo, 1))
    edge = np.empty(block + 2 * radius, scores.dtype)
    ping = np.empty(block + 2 * radius, scores.dtype)
    pong = np.empty(block + 2 * radius, scores.dtype)
    is_maximum = np.empty(block, np.uint8)
    for low in range(lo, hi, block):
        n = min(block, hi - low)
        if radius == 0:
            _mark_high(scores[low : low + n], threshold, is_maximum[:n])
        else:
            if low - radius >= begin:
                x = scores[low - radius : low + n + radius]
            else:
                missing = begin - (low - radius)
                x = edge[: n + 2 * radius]
                x[:missing] = -np.inf
                x[missing:] = scores[begin : low + n + radius]
            window = x
            span = 1
            while span < radius:
                step = min(span, radius - span)
                wider = ping[: window.size - step]
                _pairwise_max(window[: wider.size], window[step:], wider)
                window = wider
                ping, pong = pong, ping
                span += step
            _mark_maxima(
                x[radius : radius + n],
                window[:n],
                window[radius + 1 : radius + 1 + n],
                threshold,
                is_maximum[:n],
            )
        for i in range(n):
            out[count] = low + i
            count += is_maximum[i]
    return count


@jit
def content_boundaries(scores, begin, end, lo, hi, radius, threshold, m, M, ladder, out):
    """Write the content boundaries in [lo, hi) of the sequence [begin, end), return their number.

    ``out`` holds one more than can be found. The caller sees to it that lo > begin and that
    token hi - 1 + lag exists.
    """
    if hi <= lo:
        return 0
    if not ladder:
        return _maxima(scores, begin, lo, hi, radius, threshold, out)
    # Everything within M of [lo, hi) decides which gap a fine maximum lies in.
    first = max(lo - M, begin + 1)
    last = min(hi + M, end - radius)
    anchors = np.empty((last - first) // (radius + 1) + 2, np.int64)
    n_anchors = _maxima(scores, begin, first, last, radius, threshold, anchors)
    fine = np.empty((hi - lo) // m + 2, np.int64)
    n_fine = _maxima(scores, begin, lo, hi, m - 1, threshold, fine)
    count = 0
    j = 0
    for i in range(n_fine):  # anchors are fine maxima too: m - 1 <= radius
        t = fine[i]
        while j < n_anchors and anchors[j] < t:
            j += 1
        if j < n_anchors and anchors[j] == t:
            out[count] = t
            count += 1
            continue
        before = anchors[j - 1] if j > 0 else max(begin, first - 1)
        after = anchors[j] if j < n_anchors else _NEVER
        if t - before >= m and after - t >= m and after - before > M:
            out[count] = t
            count += 1
    return count


@jit
def place(content, base, known, m, M, lag, starts, known_at, kinds):
    """Write the boundaries after ``base`` that are known, return their number.

    ``content`` holds the content boundaries after ``base``; all up to token ``known`` are there.
    """
    count = 0
    for c in content:
        q = base + M
        while q < c:
            starts[count] = q
            known_at[count] = q + m - 1 + lag
            kinds[count] = _FORCED
            if c - q < m:
                starts[count] = c - m
                known_at[count] = c + lag
            q += M
            count += 1
        starts[count] = c
        known_at[count] = c + lag
        kinds[count] = _CONTENT
        count += 1
        base = c
    q = base + M
    while q + m - 1 <= known:
        starts[count] = q
        known_at[count] = q + m - 1 + lag
        kinds[count] = _FORCED
        q += M
        count += 1
    return count


@jit
def _count(content, base, known, m, M):
    """How many boundaries :func:`place` writes."""
    count = content.size
    for c in content:
        count += (c - base - 1) // M
        base = c
    return count + max((known - (m - 1) - base) // M, 0)


@jit
def _lag(radius, m, M, ladder):
    return radius + (M - m if ladder else 0)


@jit
def _find(scores, cu_seqlens, rule, content, cu_content):
    """Write the content boundaries of all sequences; return the number of all boundaries."""
    radius, threshold, m, M, ladder = rule
    lag = _lag(radius, m, M, ladder)
    total = 0
    for b in range(cu_seqlens.size - 1):
        begin, end = cu_seqlens[b], cu_seqlens[b + 1]
        mine = content[cu_content[b] :]
        found = content_boundaries(
            scores, begin, end, begin + 1, end - lag, radius, threshold, m, M, ladder, mine
        )
        cu_content[b + 1] = cu_content[b] + found
        if end > begin:
            total += 1 + _count(mine[:found], begin, end - 1 - lag, m, M)
    return total


@jit
def _fill(content, cu_content, cu_seqlens, rule, starts, visible_from, kinds):
    _, _, m, M, ladder = rule
    lag = _lag(rule[0], m, M, ladder)
    n = 0
    for b in range(cu_seqlens.size - 1):
        begin, end = cu_seqlens[b], cu_seqlens[b + 1]
        if end > begin:
            starts[n] = begin
            kinds[n] = _START
            mine = content[cu_content[b] : cu_content[b + 1]]
            known = end - 1 - lag
            # A boundary becomes known when the chunk before it is closed: one place to the left.
            n += 1 + place(
                mine, begin, known, m, M, lag, starts[n + 1 :], visible_from[n:], kinds[n + 1 :]
            )
            visible_from[n - 1] = _NEVER


@jit
def advance(scores, old, new, base, settings, threshold, out):
    """Boundaries of one sequence that its tokens [old, new) make known, after boundary ``base``.

    ``settings`` is (radius, m, M, ladder) as one array: a call from Python costs by the argument.
    Writes a column of ``out`` [3, >= new - old + m] each (start, known at, kind), returns how many.
    """
    radius, m, M, ladder = settings[0], settings[1], settings[2], settings[3] != 0
    lag = _lag(radius, m, M, ladder)
    lo, hi = max(old - lag, 1), new - lag
    if hi <= lo and base + M + m - 1 > hi - 1:
        return 0
    content = np.empty(max(hi - lo, 0) + 1, np.int64)
    found = content_boundaries(scores, 0, new, lo, hi, radius, threshold, m, M, ladder, content)
    return place(content[:found], base, hi - 1, m, M, lag, out[0], out[1], out[2])
