"""Attention over listed entries and a run of raw tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk.ops._attention import Operands
from dynchunk.ops.reference import _softmax
from dynchunk.ops.reference._softmax import Mask, Part


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    x = Operands(q, k, v, entry_k, entry_v, bias, sink)
    parts = _softmax.parts(x, cu_seqlens_q, cu_seqlens_k, cu_entries)
    return _softmax.attend(x, parts, _mask(n_visible, raw_start, indices), scale)


def attend_selected_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, entry_k, entry_v, bias and sink."""
    x = Operands(q, k, v, entry_k, entry_v, bias, sink)
    parts = _softmax.parts(x, cu_seqlens_q, cu_seqlens_k, cu_entries)
    mask = _mask(n_visible, raw_start, indices)
    return _softmax.attend_backward(grad_out, grad_lse, out, lse, x, parts, mask, scale)


def _mask(n_visible: Tensor, raw_start: Tensor, indices: Tensor) -> Mask:
    def of(part: Part) -> Tensor:
        seen = _softmax.entry_mask(part, n_visible)
        entries = _softmax.listed_mask(part, indices, seen.shape[-1]) & seen
        raw = _softmax.raw_mask(part, raw_start).expand(len(entries), -1, -1)
        return torch.cat([entries, raw], -1)

    return of
