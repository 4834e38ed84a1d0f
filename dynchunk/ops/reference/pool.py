"""Chunks to entries: one softmax per entry and channel, over a contiguous run of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk.ops._entries import inverse_rms, norm_backward, turn
from dynchunk.ops._registration import wide_dtype


def pool(
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    norm: Tensor | None,
    before: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    rows: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the entries [N, H, D]."""
    pooled = _rows(before, starts, ends, rows)
    weights, read = _weights(pooled, values, gate, slot_bias, norm)
    entries = _sum(weights * read, pooled)
    if norm is not None:
        entries = entries * inverse_rms(entries, eps) * norm
    if cos is not None and sin is not None:
        entries = turn(entries, cos, sin)
    return entries.to(values.dtype)


def pool_backward(
    grad: Tensor,
    entries: Tensor,
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    norm: Tensor | None,
    before: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    rows: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of values, gate, slot_bias and norm."""
    pooled = _rows(before, starts, ends, rows)
    weights, read = _weights(pooled, values, gate, slot_bias, norm)
    mean = _sum(weights * read, pooled)
    grad, d_norm = grad.to(weights.dtype), grad.new_empty(0)
    if cos is not None and sin is not None:
        grad = turn(grad, cos, -sin)
    if norm is not None:
        grad, d_norm = norm_backward(grad, mean, norm, eps)
    grad_read = weights * grad[pooled.entry]
    grad_logits = grad_read * (read - mean[pooled.entry])
    return (
        _scatter(grad_read, pooled.token, pooled, values),
        grad.new_empty(0) if gate is None else _scatter(grad_logits, pooled.token, pooled, gate),
        grad.new_empty(0)
        if slot_bias is None
        else _scatter(grad_logits, _bias_row(pooled, slot_bias), pooled, slot_bias),
        d_norm,
    )


def pool_state(
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    slots: Tensor,
    highest: Tensor,
    total: Tensor,
    weighted: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states (maximum, sum, weighted sum), each [N, H, D], after more tokens."""
    pooled = _rows(None, starts, ends, None)
    pooled = pooled._replace(slot=pooled.slot + slots[pooled.entry])
    read = _gather(values, pooled.token, pooled).to(weighted.dtype)
    logits = _logits(pooled, read, gate, slot_bias)
    new_highest = torch.maximum(highest, _max(logits, pooled))
    # A chunk of no token yet has no maximum; any finite number serves.
    base = new_highest.where(new_highest > -torch.inf, 0)
    old, weights = (highest - base).exp(), (logits - base[pooled.entry]).exp()
    return (
        new_highest,
        total * old + _sum(weights, pooled),
        weighted * old + _sum(weights * read, pooled),
    )


class _Rows(NamedTuple):
    """The tokens that entries pool, entry after entry: R rows."""

    lengths: Tensor  #: [N], rows of each entry
    entry: Tensor  #: [R]
    token: Tensor  #: [R], its row
    slot: Tensor  #: [R], from the start of the token's own chunk
    series: Tensor  #: [R], with overlap 0 for tokens before the entry's chunk and 1 for its own
    n_series: int


def _rows(
    before: Tensor | None, starts: Tensor, ends: Tensor, row_of_token: Tensor | None
) -> _Rows:
    first = starts if before is None else before
    lengths = ends - first
    entry = torch.repeat_interleave(lengths)
    index = torch.arange(len(entry), device=starts.device)
    token = index + (first - (lengths.cumsum(0) - lengths))[entry]
    is_own = token >= starts[entry]
    slot = token - torch.where(is_own, starts[entry], first[entry])
    if row_of_token is not None:
        token = row_of_token[token]
    if before is None:
        return _Rows(lengths, entry, token, slot, torch.zeros_like(slot), 1)
    return _Rows(lengths, entry, token, slot, is_own.to(slot.dtype), 2)


def _weights(
    rows: _Rows,
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    norm: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the softmax weights and the values that they weigh, both [R, H, D]."""
    read = _gather(values, rows.token, rows).to(wide_dtype(values, gate, slot_bias, norm))
    logits = _logits(rows, read, gate, slot_bias)
    weights = (logits - _max(logits, rows)[rows.entry]).exp()
    return weights / _sum(weights, rows)[rows.entry], read


def _logits(rows: _Rows, read: Tensor, gate: Tensor | None, slot_bias: Tensor | None) -> Tensor:
    logits = torch.zeros_like(read)
    if gate is not None:
        logits = logits + _gather(gate, rows.token, rows)
    if slot_bias is not None:
        logits = logits + _gather(slot_bias, _bias_row(rows, slot_bias), rows)
    return logits


def _bias_row(rows: _Rows, slot_bias: Tensor) -> Tensor:
    return rows.slot.clamp(max=len(slot_bias) - 1)


def _sum(x: Tensor, rows: _Rows) -> Tensor:
    """Sum the rows of each entry in their order, so that other entries change no bit of it."""
    return torch.segment_reduce(x, "sum", lengths=rows.lengths, axis=0, unsafe=True)


def _max(x: Tensor, rows: _Rows) -> Tensor:
    return torch.segment_reduce(x, "max", lengths=rows.lengths, axis=0, unsafe=True)


def _gather(x: Tensor, index: Tensor, rows: _Rows) -> Tensor:
    """Read x [.., H, series * D] at ``index``, each row in its series: [R, H, D]."""
    return _by_series(x, rows)[index, rows.series]


def _scatter(grad: Tensor, index: Tensor, rows: _Rows, like: Tensor) -> Tensor:
    """Add up rows [R, H, D] where :func:`_gather` reads them from ``like``."""
    total = torch.zeros(like.shape, dtype=grad.dtype, device=grad.device)
    _by_series(total, rows).index_put_((index, rows.series), grad, accumulate=True)
    return total.to(like.dtype)


def _by_series(x: Tensor, rows: _Rows) -> Tensor:
    """View x [.., H, series * D] as [.., series, H, D]."""
    width = x.shape[-1] // rows.n_series
    return x.reshape(*x.shape[:-1], rows.n_series, width).transpose(1, 2)
