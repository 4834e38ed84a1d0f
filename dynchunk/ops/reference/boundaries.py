"""The boundary rule in vectorised torch: no loop over tokens, chunks or sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynchunk.chunks import NEVER, Kind
from dynchunk.ops.boundaries import RuleParameters

#: (scores [T], cu_seqlens [B+1], radius) -> bool [T]
Maxima = Callable[[Tensor, Tensor, int], Tensor]


def boundaries(
    scores: Tensor, cu_seqlens: Tensor, p: RuleParameters, maxima: Maxima | None = None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (starts, visible_from, kinds), or None if a score is NaN.

    ``maxima`` finds the local maxima; default: :func:`plain_maxima`. On a GPU the host waits twice,
    for the numbers of bases and of chunks, which depend on the scores; nothing else leaves it.
    """
    device, total = scores.device, len(scores)
    token = torch.arange(total, device=device)
    lengths = cu_seqlens.diff()
    begin, end = (
        torch.repeat_interleave(x, lengths, output_size=total)
        for x in (cu_seqlens[:-1], cu_seqlens[1:])
    )
    find, is_high = maxima or plain_maxima, scores.double() >= p.threshold
    is_content = is_high & find(scores, cu_seqlens, p.radius)
    if p.ladder:
        fine = is_high & find(scores, cu_seqlens, p.min_length - 1)
        is_content = _refine(is_content, fine, begin, end, p)
    is_content &= (token > begin) & (token + p.lag < end)

    # Bases: first tokens and content boundaries. Each is followed by its forced cuts.
    # A NaN leaves no base at all, so that its check does not make the host wait once more.
    base = ((is_content | (token == begin)) & ~scores.isnan().any()).nonzero().flatten()
    if len(base) == 0 and total > 0:
        return None
    following = torch.cat([base[1:], cu_seqlens[-1:]])[: len(base)]
    stop = torch.minimum(following, end[base])
    is_bounded = stop < end[base]
    known_content = stop - 1 - p.lag  # no content boundary after the base, up to here
    open_cuts = (known_content - (p.min_length - 1) - base).div(p.max_length, rounding_mode="floor")
    bounded_cuts = (stop - base - 1).div(p.max_length, rounding_mode="floor")
    cuts = torch.where(is_bounded, bounded_cuts, open_cuts.clamp(min=0))

    which = torch.repeat_interleave(torch.arange(len(base), device=device), cuts + 1)
    first = torch.cat([cuts.new_zeros(1), (cuts + 1).cumsum(0)])[:-1]
    index = torch.arange(len(which), device=device) - first[which]
    starts = base[which] + index * p.max_length
    next_base = torch.where(is_bounded, stop, NEVER)[which]
    moves = (index > 0) & (next_base - starts < p.min_length)
    starts = torch.where(moves, next_base - p.min_length, starts)

    known = starts + p.lag + torch.where(index > 0, p.min_length - 1, 0)
    known = torch.where(moves, next_base + p.lag, known)
    is_first = starts == begin[starts]
    kinds = torch.where(index > 0, int(Kind.FORCED), int(Kind.CONTENT))
    kinds = torch.where(is_first, int(Kind.START), kinds).to(torch.int8)
    closed_by_next = torch.cat([~is_first[1:], is_first.new_zeros(1)])[: len(starts)]
    visible_from = torch.where(closed_by_next, known.roll(-1), NEVER)
    return starts, visible_from, kinds


def plain_maxima(scores: Tensor, cu_seqlens: Tensor, radius: int) -> Tensor:
    """Mark the maxima of a radius, bool [T]; not valid in the last ``radius`` of a sequence."""
    if radius == 0 or len(scores) == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # A gap of ``radius`` times -inf around every sequence keeps neighbours out of the windows.
    gaps = torch.arange(1, len(cu_seqlens), device=scores.device) * radius
    at = torch.arange(len(scores), device=scores.device)
    at = at + torch.repeat_interleave(gaps, cu_seqlens.diff(), output_size=len(scores))
    padded = scores.new_full((len(scores) + (len(cu_seqlens) + 1) * radius,), -torch.inf)
    padded[at] = scores
    window = _window_max(padded, radius)
    return (scores > window[at - radius]) & (scores >= window[at + 1])


def _window_max(x: Tensor, width: int) -> Tensor:
    """Maximum of x[i .. i + width - 1] for every i, by doubling."""
    span = 1
    while 2 * span <= width:
        x = torch.maximum(x[:-span], x[span:])
        span *= 2
    rest = width - span
    return torch.maximum(x[:-rest], x[rest:]) if rest else x


def _refine(
    is_anchor: Tensor, is_fine: Tensor, begin: Tensor, end: Tensor, p: RuleParameters
) -> Tensor:
    """Add the maxima of radius m - 1 in gaps of more than M tokens between anchors."""
    token = torch.arange(len(begin), device=begin.device)
    is_anchor = is_anchor & (token > begin) & (token + p.radius < end)
    previous = torch.where(is_anchor | (token == begin), token, -1).cummax(0).values
    following = torch.where(is_anchor, token, NEVER).flip(0).cummin(0).values.flip(0)
    following = torch.where(following < end, following, NEVER)
    is_far = (token - previous >= p.min_length) & (following - token >= p.min_length)
    is_wide = following - previous > p.max_length
    return is_anchor | (is_fine & is_far & is_wide)
