"""Attention over listed entries and a run of raw tokens, in numba."""

from __future__ import annotations

from torch import Tensor

from dynchunk.ops._attention import Operands, check_rows
from dynchunk.ops.cpu import _attention, _listed
from dynchunk.ops.cpu._arrays import require_dtypes


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
    require_dtypes(*x)
    check_rows(x, cu_seqlens_q, cu_seqlens_k, cu_entries)
    layout = (cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start)
    return _listed.attend_entries(x, *layout, indices, scale)


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
    layout = (cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start)
    return _attention.backward(grad_out, grad_lse, out, lse, x, *layout, indices, scale)
