"""Chunks to entries: one softmax per entry and channel, over a contiguous run of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk.ops._registration import wide_dtype


def pool(
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    before: Tensor | None,
    starts: Tensor,
    ends: Tensor,
) -> Tensor:
    """Return the entries [N, H, D]."""
    rows = _rows(before, starts, ends)
    weights, read = _weights(rows, values, gate, slot_bias)
    return _sum(weights * read, rows).to(values.dtype)


def pool_backward(
    grad: Tensor,
    entries: Tensor,
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    before: Tensor | None,
    starts: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, gate and slot_bias."""
    rows = _rows(before, starts, ends)
    weights, read = _weights(rows, values, gate, slot_bias)
    grad_read = weights * grad.to(weights.dtype)[rows.entry]
    grad_logits = grad_read * (read - entries.to(weights.dtype)[rows.entry])
    return (
        _scatter(grad_read, rows.token, rows, values),
        grad.new_empty(0) if gate is None else _scatter(grad_logits, rows.token, rows, gate),
        grad.new_empty(0)
        if slot_bias is None
        else _scatter(grad_logits, _bias_row(rows, slot_bias), rows, slot_bias),
    )


class _Rows(NamedTuple):
    """The tokens that entries pool, entry after entry: R rows."""

    lengths: Tensor  #: [N], rows of each entry
    entry: Tensor  #: [R]
    token: Tensor  #: [R]
    slot: Tensor  #: [R], from the start of the token's own chunk
    series: Tensor  #: [R], with overlap 0 for tokens before the entry's chunk and 1 for its own
    n_series: int


def _rows(before: Tensor | None, starts: Tensor, ends: Tensor) -> _Rows:
    first = starts if before is None else before
    lengths = ends - first
    entry = torch.repeat_interleave(lengths)
    index = torch.arange(len(entry), device=starts.device)
    token = index + (first - (lengths.cumsum(0) - lengths))[entry]
    is_own = token >= starts[entry]
    slot = token - torch.where(is_own, starts[entry], first[entry])
    if before is None:
        return _Rows(lengths, entry, token, slot, torch.zeros_like(slot), 1)
    return _Rows(lengths, entry, token, slot, is_own.to(slot.dtype), 2)


def _weights(
    rows: _Rows, values: Tensor, gate: Tensor | None, slot_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the softmax weights and the values that they weigh, both [R, H, D]."""
    read = _gather(values, rows.token, rows).to(wide_dtype(values, gate, slot_bias))
    logits = torch.zeros_like(read)
    if gate is not None:
        logits = logits + _gather(gate, rows.token, rows)
    if slot_bias is not None:
        logits = logits + _gather(slot_bias, _bias_row(rows, slot_bias), rows)
    highest = torch.segment_reduce(logits, "max", lengths=rows.lengths, axis=0, unsafe=True)
    weights = (logits - highest[rows.entry]).exp()
    return weights / _sum(weights, rows)[rows.entry], read


def _bias_row(rows: _Rows, slot_bias: Tensor) -> Tensor:
    return rows.slot.clamp(max=len(slot_bias) - 1)


def _sum(x: Tensor, rows: _Rows) -> Tensor:
    """Sum the rows of each entry in their order, so that other entries change no bit of it."""
    return torch.segment_reduce(x, "sum", lengths=rows.lengths, axis=0, unsafe=True)


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
