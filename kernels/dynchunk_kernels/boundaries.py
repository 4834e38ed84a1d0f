"""Local maxima of scores on the device: the part of the boundary rule that reads every token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynchunk_kernels.offline import Case

_BLOCK = 1024


@triton.jit(do_not_specialize=["T", "radius"])
def maxima_kernel(p_scores, p_begin, p_out, T, radius, BLOCK: tl.constexpr):
    """Mark t if its score beats the ``radius`` scores before it and equals or beats those after."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_t = t < T
    b_score = tl.load(p_scores + t, mask=m_t, other=0.0)
    b_begin = tl.load(p_begin + t, mask=m_t, other=0)
    b_ok = m_t
    for d in range(1, radius + 1):  # neighbours come from the first-level cache
        m_left, m_right = m_t & (t - d >= b_begin), t + d < T
        b_left = tl.load(p_scores + t - d, mask=m_left, other=0.0)
        b_right = tl.load(p_scores + t + d, mask=m_right, other=0.0)
        b_ok &= ((b_score > b_left) | ~m_left) & ((b_score >= b_right) | ~m_right)
    tl.store(p_out + t, b_ok, mask=m_t)


def maxima(scores: Tensor, cu_seqlens: Tensor, radius: int) -> Tensor:
    """Mark the local maxima of a radius, sequence by sequence.

    Parameters
    ----------
    scores : float32 or float64 tensor [T]
    cu_seqlens : int64 tensor [B+1]
    radius : int >= 0

    Returns
    -------
    bool tensor [T]
        Not valid in the last ``radius`` tokens of a sequence.
    """
    scores = scores.contiguous()
    T = len(scores)
    begin = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=T)
    out = torch.empty(T, dtype=torch.bool, device=scores.device)
    if T:
        maxima_kernel[(triton.cdiv(T, _BLOCK),)](scores, begin, out, T, radius, BLOCK=_BLOCK)
    return out


def cases() -> Iterator[Case]:
    """Yield the configurations: dtypes of scores."""
    for dtype in ("fp32", "fp64"):
        signature = {
            "p_scores": f"*{dtype}",
            "p_begin": "*i64",
            "p_out": "*i1",
            "T": "i64",
            "radius": "i32",
            "BLOCK": "constexpr",
        }
        constants = {"BLOCK": _BLOCK}
        yield Case(maxima_kernel, dtype, signature, constants, 4, 3, is_matmul=False)
