"""Rows to where an index says, zeros elsewhere: tokens into tiles, and tiles back into tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels.offline import Case

_ELEMENTS = 4096  # of a program
_WARPS = 4


@triton.jit(do_not_specialize=["P"])
def gather_rows_kernel(
    p_x, p_index, p_out, P, W, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Copy row index[p] of x to row p of out, zeros where the index is negative."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(p_index + p, mask=p < P, other=-1).to(tl.int64)
    m_w = (w < W)[None, :]
    b_x = tl.load(p_x + (row * W)[:, None] + w[None, :], mask=(row >= 0)[:, None] & m_w, other=0)
    tl.store(p_out + (p * W)[:, None] + w[None, :], b_x, mask=(p < P)[:, None] & m_w)


class Blocks(NamedTuple):
    """Tile of a program."""

    BLOCK_P: int  #: rows
    BLOCK_W: int  #: elements of a row


def config(W: int) -> Blocks:
    """Choose the tile for rows of ``W`` elements."""
    block_w = min(triton.next_power_of_2(W), 512)
    return Blocks(_ELEMENTS // block_w, block_w)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` [P] of ``x`` [T, ...] as [P, ...]; zeros where it is negative."""
    P = len(index)
    out = x.new_empty(P, *x.shape[1:])
    if out.numel() == 0:
        return out
    W = int(out.numel() // P)  # a compiler that traces lengths as symbols takes this as it is
    blocks = config(W)
    grid = (triton.cdiv(P, blocks.BLOCK_P), triton.cdiv(W, blocks.BLOCK_W))
    wrap_triton(gather_rows_kernel)[grid](
        x.contiguous(), index, out, P, W, **blocks._asdict(), num_warps=_WARPS
    )
    return out


def cases() -> Iterator[Case]:
    """Yield configurations: widths of rows, dtypes."""
    for W, kind in ((64, "*bf16"), (128, "*fp32"), (512, "*bf16"), (4096, "*bf16")):
        signature = {"p_x": kind, "p_index": "*i64", "p_out": kind, "P": "i64", "W": "i32"}
        constants = config(W)._asdict()
        yield Case(
            gather_rows_kernel,
            f"W={W} {kind[1:]}",
            signature | dict.fromkeys(constants, "constexpr"),
            constants,
            _WARPS,
            num_stages=3,
            is_matmul=False,
            divisible=("W",),
        )
