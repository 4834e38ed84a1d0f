"""Attention over the raw tokens of listed chunks and a run of raw tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops._attention import Operands
from dynchunk.ops.reference import _softmax
from dynchunk.ops.reference._softmax import Mask, Part


def attend_selected_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_chunks: Tensor,
    starts: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    x = _operands(q, k, v, sink, len(cu_chunks))
    parts = _softmax.parts(x, cu_seqlens_q, cu_seqlens_k, torch.zeros_like(cu_chunks))
    mask = _mask(cu_seqlens_q, cu_chunks, starts, raw_start, indices, block)
    return _softmax.attend(x, parts, mask, scale)


def attend_selected_chunks_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_chunks: Tensor,
    starts: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and sink."""
    x = _operands(q, k, v, sink, len(cu_chunks))
    parts = _softmax.parts(x, cu_seqlens_q, cu_seqlens_k, torch.zeros_like(cu_chunks))
    mask = _mask(cu_seqlens_q, cu_chunks, starts, raw_start, indices, block)
    grads = _softmax.attend_backward(grad_out, grad_lse, out, lse, x, parts, mask, scale)
    grad_q, grad_k, grad_v, _, _, _, grad_sink = grads
    return grad_q, grad_k, grad_v, grad_sink


def _operands(q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, views: int) -> Operands:
    rows = (0, k.shape[1] // views)
    entry_v = None if v is None else v.new_empty(*rows, v.shape[2])
    return Operands(q, k, v, k.new_empty(*rows, k.shape[2]), entry_v, None, sink)


def _mask(
    cu_seqlens_q: Tensor,
    cu_chunks: Tensor,
    starts: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    block: int,
) -> Mask:
    n_blocks = (cu_seqlens_q.diff() + block - 1) // block
    sequence = torch.repeat_interleave(cu_seqlens_q.diff())
    index = torch.arange(len(sequence), device=sequence.device) - cu_seqlens_q[sequence]
    total = int(n_blocks.sum())
    require(len(indices) == total, "indices", f"{total} rows, one for each block", indices)
    lists = indices[(n_blocks.cumsum(0) - n_blocks)[sequence] + index // block]

    def of(part: Part) -> Tensor:
        first, last = cu_chunks[part.view, part.sequence : part.sequence + 2].tolist()
        token = torch.arange(part.tokens.start, part.tokens.stop, device=starts.device)
        chunk = torch.searchsorted(starts[first:last], token, right=True) - 1
        is_listed = _softmax.listed_mask(part, lists, last - first)[..., chunk]
        past = _softmax.causal_mask(part, starts.device)
        return (is_listed & past) | _softmax.raw_mask(part, raw_start)

    return of
