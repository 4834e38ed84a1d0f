"""Chunks to entries in numba: entry by entry, with all channels of a head side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynchunk.ops._entries import inverse_rms, norm_backward, turn
from dynchunk.ops.cpu import fast, jit
from dynchunk.ops.cpu._arrays import Array, flat, require_dtypes
from dynchunk.ops.cpu._numeric import LOG2_E, exp2
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu._tiles import widen

_PARTS = 8  # runs of entries that add up gradients of the slot bias of their own


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
    require_dtypes(values, gate, slot_bias, norm)
    dtype = values.dtype
    values, gate = _in_order(values, rows), _in_order(gate, rows)
    entries = _means(values, gate, slot_bias, _spans(before, starts, ends))
    if norm is not None:
        entries = entries * inverse_rms(entries, eps) * norm
    if cos is not None and sin is not None:
        entries = turn(entries, cos, sin)
    return entries.to(dtype)


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
    """Return the gradients of values, gate, slot_bias and norm.

    A token is in one entry of each series, as of :meth:`~dynchunk.ops.layout.Spans.of`.
    """
    require_dtypes(values, gate, slot_bias, norm)
    given = values, gate, slot_bias
    values, gate = _in_order(values, rows), _in_order(gate, rows)
    spans = _spans(before, starts, ends)
    wide, of_norm = grad.detach().float(), grad.new_empty(0)
    if cos is not None and sin is not None:
        wide = turn(wide, cos, -sin)
    if norm is not None:
        wide, of_norm = norm_backward(wide, _means(values, gate, slot_bias, spans), norm, eps)
    sizes = [(0, 0, 0) if x is None else tuple(x.shape) for x in (values, gate, slot_bias)]
    of_values, of_gate = (np.zeros(size, np.float32) for size in sizes[:2])
    of_bias = np.zeros((_PARTS, *sizes[2]), np.float32)
    run(_pool_backward, _PARTS, *_stored(values, gate, slot_bias), spans,
        wide.contiguous().numpy(), of_values, of_gate, of_bias)  # fmt: skip
    found = [torch.from_numpy(x) for x in (of_values, of_gate, of_bias.sum(0))]
    found[:2] = (_back(x, rows, like) for x, like in zip(found[:2], given[:2], strict=True))
    grads = (
        grad.new_empty(0) if x is None else y.to(x.dtype) for x, y in zip(given, found, strict=True)
    )
    return *grads, of_norm


def _means(values: Tensor, gate: Tensor | None, slot_bias: Tensor | None, spans: Array) -> Tensor:
    """Return the weighted means, float32 [N, H, D]."""
    out = np.zeros((len(spans), values.shape[1], values.shape[2] // spans.shape[1]), np.float32)
    run(_pool, len(spans), *_stored(values, gate, slot_bias), spans, out)
    return torch.from_numpy(out)


def _in_order(x: Tensor | None, rows: Tensor | None) -> Any:
    """Return the rows of the tokens, one after another."""
    return x if x is None or rows is None else x[rows]


def _back(grad: Tensor, rows: Tensor | None, like: Tensor | None) -> Tensor:
    """Return the gradient of what :func:`_in_order` was given."""
    if rows is None or like is None:
        return grad
    return grad.new_zeros(like.shape).index_copy_(0, rows, grad)


def _stored(values: Tensor, gate: Tensor | None, slot_bias: Tensor | None) -> tuple[Any, ...]:
    """Return the operands, and the number of slots."""
    return flat(values), flat(gate), flat(slot_bias), 0 if slot_bias is None else len(slot_bias)


def _spans(before: Tensor | None, starts: Tensor, ends: Tensor) -> Array:
    """Return (first token, end) of each entry in each series, int64 [N, series, 2]."""
    own = torch.stack([starts, ends], 1)
    series = [own] if before is None else [torch.stack([before, starts], 1), own]
    return torch.stack(series, 1).long().contiguous().numpy()


@fast
def _write_logits(gate, bias, slots, t, h, slot, offset, logits):
    """Write the logits of token t and head h in units of log 2."""
    (gates, gate_steps), (biases, bias_steps) = gate, bias
    logits[:] = 0
    if gates.size:
        at = t * gate_steps[0] + h * gate_steps[1] + offset
        row = gates[at : at + logits.size]
        for d in range(logits.size):
            logits[d] += widen(row[d]) * LOG2_E
    if biases.size:
        at = min(slot, slots - 1) * bias_steps[0] + h * bias_steps[1] + offset
        of_slot = biases[at : at + logits.size]
        for d in range(logits.size):
            logits[d] += widen(of_slot[d]) * LOG2_E


@fast
def _pool_one(values, gate, bias, slots, spans, h, logits, peak, total, out):
    """Pool one entry of one head: its softmax's maximum, its sum and the mean of its values."""
    values, steps = values
    peak[:] = -np.inf
    total[:] = 0
    out[:] = 0
    for series in range(len(spans)):
        for t in range(spans[series, 0], spans[series, 1]):
            _write_logits(gate, bias, slots, t, h, t - spans[series, 0], series * out.size, logits)
            for d in range(out.size):
                peak[d] = logits[d] if logits[d] > peak[d] else peak[d]
    for series in range(len(spans)):
        for t in range(spans[series, 0], spans[series, 1]):
            _write_logits(gate, bias, slots, t, h, t - spans[series, 0], series * out.size, logits)
            at = t * steps[0] + h * steps[1] + series * out.size
            row = values[at : at + out.size]
            for d in range(out.size):
                weight = exp2(logits[d] - peak[d])
                total[d] += weight
                out[d] += weight * widen(row[d])
    if spans[-1, 0] < spans[-1, 1]:
        for d in range(out.size):
            out[d] /= total[d]


@jit
def _pool(first, last, values, gate, bias, slots, spans, out):
    H, D = out.shape[1:]
    logits, peak, total = np.empty(D, np.float32), np.empty(D, np.float32), np.empty(D, np.float32)
    for i in range(first, last):
        for h in range(H):
            _pool_one(values, gate, bias, slots, spans[i], h, logits, peak, total, out[i, h])


@fast
def _pool_backward(
    first, last, values, gate, bias, slots, spans, grad, of_values, of_gate, of_bias
):
    H, D = grad.shape[1:]
    logits, peak, total = np.empty(D, np.float32), np.empty(D, np.float32), np.empty(D, np.float32)
    mean = np.empty(D, np.float32)
    stored, steps = values
    for part in range(first, last):
        for i in range(part * len(spans) // _PARTS, (part + 1) * len(spans) // _PARTS):
            for h in range(H):
                _pool_one(values, gate, bias, slots, spans[i], h, logits, peak, total, mean)
                for series in range(spans.shape[1]):
                    offset = series * D
                    for t in range(spans[i, series, 0], spans[i, series, 1]):
                        slot = t - spans[i, series, 0]
                        _write_logits(gate, bias, slots, t, h, slot, offset, logits)
                        at = t * steps[0] + h * steps[1] + offset
                        row, own = stored[at : at + D], of_values[t, h, offset : offset + D]
                        for d in range(D):
                            share = exp2(logits[d] - peak[d]) / total[d] * grad[i, h, d]
                            own[d] += share
                            logits[d] = share * (widen(row[d]) - mean[d])
                        if of_gate.size:
                            of_gate[t, h, offset : offset + D] += logits
                        if slots:
                            of_bias[part, min(slot, slots - 1), h, offset : offset + D] += logits
