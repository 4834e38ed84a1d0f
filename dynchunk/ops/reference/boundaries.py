"""The boundary rule in vectorised torch: no loop over tokens, chunks or sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk.chunks import NEVER, Kind
from dynchunk.ops.boundaries import RuleParameters


def boundaries(
    scores: Tensor, cu_seqlens: Tensor, p: RuleParameters
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (starts, visible_from, kinds), or None if a score is NaN."""
    if bool(scores.isnan().any()):
        return None
    device, total = scores.device, len(scores)
    token = torch.arange(total, device=device)
    sequence = torch.repeat_interleave(
        torch.arange(len(cu_seqlens) - 1, device=device), cu_seqlens.diff()
    )
    begin, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
    is_content = _maxima(scores, sequence, p.radius, p.threshold)
    if p.ladder:
        is_content = _refine(is_content, scores, sequence, begin, end, p)
    is_content &= (token > begin) & (token + p.lag < end)

    # Bases: first tokens and content boundaries. Each is followed by its forced cuts.
    base = (is_content | (token == begin)).nonzero().flatten()
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


def _maxima(scores: Tensor, sequence: Tensor, radius: int, threshold: float) -> Tensor:
    """Mark the maxima of a radius, bool [T]; not valid in the last ``radius`` tokens."""
    is_high = scores.double() >= threshold
    if radius == 0 or len(scores) == 0:
        return is_high
    # A gap of ``radius`` times -inf around every sequence keeps neighbours out of the windows.
    at = torch.arange(len(scores), device=scores.device) + (sequence + 1) * radius
    padded = scores.new_full((int(at[-1]) + 1 + 2 * radius,), -torch.inf)
    padded[at] = scores
    window = _window_max(padded, radius)
    return is_high & (scores > window[at - radius]) & (scores >= window[at + 1])


def _window_max(x: Tensor, width: int) -> Tensor:
    """Maximum of x[i .. i + width - 1] for every i, by doubling."""
    span = 1
    while 2 * span <= width:
        x = torch.maximum(x[:-span], x[span:])
        span *= 2
    rest = width - span
    return torch.maximum(x[:-rest], x[rest:]) if rest else x


def _refine(
    is_anchor: Tensor,
    scores: Tensor,
    sequence: Tensor,
    begin: Tensor,
    end: Tensor,
    p: RuleParameters,
) -> Tensor:
    """Add the maxima of radius m - 1 in gaps of more than M tokens between anchors."""
    token = torch.arange(len(scores), device=scores.device)
    is_anchor = is_anchor & (token > begin) & (token + p.radius < end)
    previous = torch.where(is_anchor | (token == begin), token, -1).cummax(0).values
    following = torch.where(is_anchor, token, NEVER).flip(0).cummin(0).values.flip(0)
    following = torch.where(following < end, following, NEVER)
    is_far = (token - previous >= p.min_length) & (following - token >= p.min_length)
    is_wide = following - previous > p.max_length
    fine = _maxima(scores, sequence, p.min_length - 1, p.threshold)
    return is_anchor | (fine & is_far & is_wide)
