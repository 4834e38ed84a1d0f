"""Attention over the raw tokens of listed chunks and a run of raw tokens, in numba."""

from __future__ import annotations

from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops._attention import Operands, check_rows
from dynchunk.ops.cpu import _listed
from dynchunk.ops.cpu._arrays import require_dtypes


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
    nothing = k[:0, : k.shape[1] // len(cu_chunks)]
    x = Operands(q, k, v, nothing, None, None, sink)
    require_dtypes(*x)
    check_rows(x, cu_seqlens_q, cu_seqlens_k, cu_chunks * 0)
    blocks = int(((cu_seqlens_q.diff() + block - 1) // block).sum())
    require(len(indices) == blocks, "indices", f"{blocks} rows, one for each block", indices)
    layout = (cu_seqlens_q, cu_seqlens_k, cu_chunks, starts, raw_start)
    return _listed.attend_chunks(x, *layout, indices, block, scale)
