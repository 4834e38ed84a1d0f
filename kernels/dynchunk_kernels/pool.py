"""Chunks to entries: an online softmax over the tokens of each chunk, for each channel.

A program takes a few chunks, and heads of up to 256 channels in all, and goes through their tokens
side by side: every row is read once, whatever the chunks' lengths. An entry's sum runs in the order
of its tokens, so that other entries change no bit of it.

Shapes: values and gate [R, H, C], slot bias [S, H, C], spans [N], entries [N, H, D], where C = D,
or 2D with overlap (series a, then b). Without ``rows`` token t is row t. ``before`` is None without
overlap. Each token belongs to one chunk, chunks come in order and the first starts at token 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels.offline import Case

_ELEMENTS = 1024  # of a tile of chunks x channels: 16 bytes of bfloat16 for each of 128 threads
_WARPS = 4
_CHUNKS_PER_SPLIT = 128  # of the slot bias's gradient

_LOWEST = tl.constexpr(-3.0e38)  # below all logits, and finite: no inf - inf in the first step


@triton.jit
def _channels(H, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads and channels of this program's columns, and which are real."""
    c = tl.arange(0, BLOCK_H * BLOCK_D)
    h = tl.program_id(1) * BLOCK_H + c // BLOCK_D
    d = tl.program_id(2) * BLOCK_D + c % BLOCK_D
    return h, d, (h < H) & (d < D)


@triton.jit
def _rows(p_rows, t, m_t):
    """Row of each token."""
    return t if p_rows is None else tl.load(p_rows + t, mask=m_t, other=0)


@triton.jit
def _token(p_values, p_gate, p_bias, row, slot, shift, m, h, d, S, stride_vt, stride_vh,
           stride_gt, stride_gh, stride_bs, stride_bh):  # fmt: skip
    """Value and logit of one token of each chunk, zero and -inf under the mask."""
    at = (row * stride_vt + shift)[:, None] + (h * stride_vh + d)[None, :]
    b_value = tl.load(p_values + at, mask=m, other=0.0).to(tl.float32)
    b_logit = tl.zeros_like(b_value)
    if p_gate is not None:
        at = (row * stride_gt + shift)[:, None] + (h * stride_gh + d)[None, :]
        b_logit += tl.load(p_gate + at, mask=m, other=0.0).to(tl.float32)
    if p_bias is not None:
        at = (tl.minimum(slot, S - 1) * stride_bs + shift)[:, None] + (h * stride_bh + d)[None, :]
        b_logit += tl.load(p_bias + at, mask=m, other=0.0).to(tl.float32)
    return b_value, tl.where(m, b_logit, -float("inf"))


@triton.jit
def _add(b_max, b_sum, b_acc, b_logit, b_value):
    """One step of the online softmax: one exponential serves the old terms or the new one."""
    b_decay = tl.exp(-tl.abs(b_logit - b_max))
    is_new = b_logit > b_max
    b_old, b_new = tl.where(is_new, b_decay, 1.0), tl.where(is_new, 1.0, b_decay)
    return tl.maximum(b_max, b_logit), b_sum * b_old + b_new, b_acc * b_old + b_new * b_value


@triton.jit
def _pooled(p_values, p_gate, p_bias, p_rows, first, start, end, m_c, h, d, S, stride_vt, stride_vh,
            stride_gt, stride_gh, stride_bs, stride_bh,
            D: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Maximum, sum and mean of this program's chunks and channels; zero for a chunk of no token."""
    b_max = tl.full([first.shape[0], h.shape[0]], _LOWEST, tl.float32)
    b_sum = tl.zeros_like(b_max)
    b_acc = tl.zeros_like(b_max)
    for j in tl.range(0, tl.max(end - first, 0), loop_unroll_factor=2):
        t = first + j
        slot, shift = _slot_and_series(t, first, start, D, OVERLAP)
        m = (t < end)[:, None] & m_c[None, :]
        b_value, b_logit = _token(
            p_values, p_gate, p_bias, _rows(p_rows, t, t < end), slot, shift, m, h, d, S,
            stride_vt, stride_vh, stride_gt, stride_gh, stride_bs, stride_bh,
        )  # fmt: skip
        if p_gate is None and p_bias is None:
            b_acc += b_value
        else:
            b_max, b_sum, b_acc = _add(b_max, b_sum, b_acc, b_logit, b_value)
    if p_gate is None and p_bias is None:
        b_max = tl.zeros_like(b_max)
        b_sum += (end - first).to(tl.float32)[:, None]
    m = (end > first)[:, None] & m_c[None, :]
    b_sum = tl.where(m, b_sum, 1.0)
    return b_max, b_sum, b_acc / b_sum


@triton.jit
def _slot_and_series(t, first, start, D: tl.constexpr, OVERLAP: tl.constexpr):
    """Offset of each token from the start of its own chunk, and first channel of its series."""
    is_own = t >= start
    slot = t - tl.where(is_own, start, first)
    return slot, is_own.to(tl.int64) * (D if OVERLAP else 0)  # known to be a multiple of D


@triton.jit
def _inverse_rms(b_x, eps, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 / RMS of each head, on every channel."""
    b_mean = _head_sum(b_x * b_x, BLOCK_H, BLOCK_D) / D
    return tl.rsqrt(b_mean + eps)


@triton.jit
def _head_sum(b_x, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum over the channels of each head, on every channel."""
    b_heads = tl.reshape(b_x, [b_x.shape[0], BLOCK_H, BLOCK_D])
    b_total = tl.sum(b_heads, 2)[:, :, None] + tl.zeros_like(b_heads)
    return tl.reshape(b_total, [b_x.shape[0], BLOCK_H * BLOCK_D])


@triton.jit
def _rotate(b_x, p_cos, p_sin, n, m_n, SIGN: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
            BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Rotate the last PAIRS pairs of neighbouring channels by SIGN times their angles."""
    half: tl.constexpr = BLOCK_H * BLOCK_D // 2
    pair = tl.arange(0, half) % (BLOCK_D // 2) - (D // 2 - PAIRS)
    m = m_n[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    b_cos = tl.load(p_cos + (n * PAIRS)[:, None] + pair[None, :], mask=m, other=1.0)
    b_sin = tl.load(p_sin + (n * PAIRS)[:, None] + pair[None, :], mask=m, other=0.0) * SIGN
    b_even, b_odd = tl.split(tl.reshape(b_x, [b_x.shape[0], half, 2]))
    b_turned = tl.join(b_even * b_cos - b_odd * b_sin, b_odd * b_cos + b_even * b_sin)
    return tl.reshape(b_turned, [b_x.shape[0], 2 * half])


@triton.jit(do_not_specialize=["N", "H", "S"])
def pool_kernel(
    p_values, p_gate, p_bias, p_before, p_starts, p_ends, p_rows, p_norm, p_cos, p_sin, p_out,
    N, H, S, stride_vt, stride_vh, stride_gt, stride_gh, stride_bs, stride_bh, eps,
    D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pool the tokens of BLOCK_N chunks; normalise and rotate their entries where asked."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = n < N
    h, d, m_c = _channels(H, D, BLOCK_H, BLOCK_D)
    start = tl.load(p_starts + n, mask=m_n, other=0)
    end = tl.load(p_ends + n, mask=m_n, other=0)
    first = start if p_before is None else tl.load(p_before + n, mask=m_n, other=0)
    _, _, b_x = _pooled(
        p_values, p_gate, p_bias, p_rows, first, start, end, m_c, h, d, S, stride_vt, stride_vh,
        stride_gt, stride_gh, stride_bs, stride_bh, D, p_before is not None,
    )  # fmt: skip
    if p_norm is not None:
        b_norm = tl.load(p_norm + d, mask=m_c, other=0.0).to(tl.float32)
        b_x = b_x * _inverse_rms(b_x, eps, D, BLOCK_H, BLOCK_D) * b_norm[None, :]
    if p_cos is not None:
        b_x = _rotate(b_x, p_cos, p_sin, n, m_n, 1.0, D, PAIRS, BLOCK_H, BLOCK_D)
    at = (n * H * D)[:, None] + (h * D + d)[None, :]
    tl.store(p_out + at, b_x.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=["T", "N", "H", "S"])
def pool_backward_kernel(
    p_grad, p_values, p_gate, p_bias, p_before, p_starts, p_ends, p_rows, p_norm, p_cos, p_sin,
    p_dvalues, p_dlogits, p_dnorm,
    T, N, H, S, stride_vt, stride_vh, stride_gt, stride_gh, stride_bs, stride_bh, eps,
    D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows that BLOCK_N entries pool, and zeros for those that nobody pools."""
    OVERLAP: tl.constexpr = p_before is not None
    IS_MEAN: tl.constexpr = p_gate is None and p_bias is None
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = n < N
    h, d, m_c = _channels(H, D, BLOCK_H, BLOCK_D)
    start = tl.load(p_starts + n, mask=m_n, other=0)
    end = tl.load(p_ends + n, mask=m_n, other=0)
    first = start if p_before is None else tl.load(p_before + n, mask=m_n, other=0)

    at = (n * H * D)[:, None] + (h * D + d)[None, :]
    b_grad = tl.load(p_grad + at, mask=m_n[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    if p_cos is not None:
        b_grad = _rotate(b_grad, p_cos, p_sin, n, m_n, -1.0, D, PAIRS, BLOCK_H, BLOCK_D)
    if IS_MEAN and p_norm is None:
        b_max = tl.zeros_like(b_grad)
        b_sum = b_max + tl.maximum(end - first, 1).to(tl.float32)[:, None]
        b_x = b_max
    else:
        b_max, b_sum, b_x = _pooled(
            p_values, p_gate, p_bias, p_rows, first, start, end, m_c, h, d, S, stride_vt, stride_vh,
            stride_gt, stride_gh, stride_bs, stride_bh, D, OVERLAP,
        )  # fmt: skip
    if p_norm is not None:
        b_scale = _inverse_rms(b_x, eps, D, BLOCK_H, BLOCK_D)
        b_dnorm = tl.sum(tl.reshape(tl.sum(b_grad * b_x * b_scale, 0), [BLOCK_H, BLOCK_D]), 0)
        i_part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        o_d = tl.arange(0, BLOCK_D)
        tl.store(p_dnorm + i_part * D + o_d, b_dnorm, mask=o_d < D)
        b_grad *= tl.load(p_norm + d, mask=m_c, other=0.0).to(tl.float32)[None, :]
        b_dot = _head_sum(b_grad * b_x, BLOCK_H, BLOCK_D) / D
        b_grad = b_scale * (b_grad - b_x * (b_scale * b_scale) * b_dot)

    after = tl.load(p_starts + n + 1, mask=n + 1 < N, other=T)
    after = tl.where(m_n, after, 0)  # one past the last token of the chunk, open or closed
    if OVERLAP:  # does the next entry pool this chunk too?
        m_next = n + 1 < N
        is_read = m_next & (tl.load(p_before + n + 1, mask=m_next, other=0) < after)
    WIDTH: tl.constexpr = 2 * D if OVERLAP else D
    for j in range(0, tl.max(after - first, 0)):
        t = first + j
        slot, shift = _slot_and_series(t, first, start, D, OVERLAP)
        m = (t < end)[:, None] & m_c[None, :]
        row = _rows(p_rows, t, t < after)
        b_value, b_logit = _token(
            p_values, p_gate, p_bias, row, slot, shift, m, h, d, S,
            stride_vt, stride_vh, stride_gt, stride_gh, stride_bs, stride_bh,
        )  # fmt: skip
        if IS_MEAN:
            b_weight = tl.where(m, 1.0 / b_sum, 0.0)
        else:
            b_weight = tl.where(m, tl.exp(b_logit - b_max) / b_sum, 0.0)
        b_dvalue = b_weight * b_grad
        b_dlogit = b_dvalue * (b_value - b_x)
        m_own = (t < after)[:, None] & m_c[None, :]
        at = (row * H * WIDTH)[:, None] + (h * WIDTH + d)[None, :]
        to = at + shift[:, None]
        tl.store(p_dvalues + to, b_dvalue.to(p_dvalues.dtype.element_ty), mask=m_own)
        if p_dlogits is not None:
            tl.store(p_dlogits + to, b_dlogit.to(p_dlogits.dtype.element_ty), mask=m_own)
        if OVERLAP:  # series a of a chunk that no next entry pools
            m_unread = m_own & ((t >= start) & ~is_read)[:, None]
            b_zero = tl.zeros_like(b_dvalue)
            tl.store(p_dvalues + at, b_zero.to(p_dvalues.dtype.element_ty), mask=m_unread)
            if p_dlogits is not None:
                tl.store(p_dlogits + at, b_zero.to(p_dlogits.dtype.element_ty), mask=m_unread)


@triton.jit(do_not_specialize=["N", "H", "S"])
def slot_bias_kernel(
    p_dlogits, p_before, p_starts, p_ends, p_rows, p_parts, N, H, S,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of logits by slot over CHUNKS chunks: one part of the bias's gradient."""
    OVERLAP: tl.constexpr = p_before is not None
    WIDTH: tl.constexpr = 2 * D if OVERLAP else D
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    c = tl.arange(0, BLOCK_H * BLOCK_D)
    h = tl.program_id(1) * BLOCK_H + c // BLOCK_D
    series = tl.program_id(2) // BLOCKS
    d = (tl.program_id(2) % BLOCKS) * BLOCK_D + c % BLOCK_D
    m_c = (h < H) & (d < D)
    o_c = h * WIDTH + series * D + d
    i_split = tl.program_id(0).to(tl.int64)
    o_n = i_split * CHUNKS + tl.arange(0, BLOCK_N)
    if OVERLAP and series == 0:
        p_first, p_last = p_before, p_starts
    else:
        p_first, p_last = p_starts, p_ends
    n_chunks = tl.minimum(N - i_split * CHUNKS, CHUNKS)
    longest = tl.zeros([], tl.int64)
    for i in range(0, n_chunks, BLOCK_N):
        first = tl.load(p_first + o_n + i, mask=o_n + i < N, other=0)
        last = tl.load(p_last + o_n + i, mask=o_n + i < N, other=0)
        longest = tl.maximum(longest, tl.max(last - first, 0))
    for s in range(0, S):
        b_sum = tl.zeros([BLOCK_N, BLOCK_H * BLOCK_D], tl.float32)
        stop = tl.where(s == S - 1, longest, tl.minimum(longest, s + 1))  # the last row serves on
        for j in range(s, stop):
            for i in range(0, n_chunks, BLOCK_N):
                t = tl.load(p_first + o_n + i, mask=o_n + i < N, other=0) + j
                m_t = t < tl.load(p_last + o_n + i, mask=o_n + i < N, other=0)
                at = (_rows(p_rows, t, m_t) * H * WIDTH)[:, None] + o_c[None, :]
                m = m_t[:, None] & m_c[None, :]
                b_sum += tl.load(p_dlogits + at, mask=m, other=0.0).to(tl.float32)
        at = (i_split * S + s) * H * WIDTH + o_c
        tl.store(p_parts + at, tl.sum(b_sum, 0), mask=m_c)


@triton.jit(do_not_specialize=["N", "H", "S"])
def pool_state_kernel(
    p_values, p_gate, p_bias, p_starts, p_ends, p_slots,
    p_max, p_sum, p_acc, p_new_max, p_new_sum, p_new_acc,
    N, H, S, stride_vt, stride_vh, stride_gt, stride_gh, stride_bs, stride_bh,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax of N chunks."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = n < N
    h, d, m_c = _channels(H, D, BLOCK_H, BLOCK_D)
    start = tl.load(p_starts + n, mask=m_n, other=0)
    end = tl.load(p_ends + n, mask=m_n, other=0)
    slot = tl.load(p_slots + n, mask=m_n, other=0)
    at_state = (n * H * D)[:, None] + (h * D + d)[None, :]
    m_state = m_n[:, None] & m_c[None, :]
    b_max = tl.load(p_max + at_state, mask=m_state, other=0.0)
    b_max = tl.maximum(b_max, _LOWEST)
    b_sum = tl.load(p_sum + at_state, mask=m_state, other=0.0)
    b_acc = tl.load(p_acc + at_state, mask=m_state, other=0.0)
    for j in range(0, tl.max(end - start, 0)):
        t = start + j
        m = (t < end)[:, None] & m_c[None, :]
        b_value, b_logit = _token(
            p_values, p_gate, p_bias, t, slot + j, tl.zeros_like(t), m, h, d, S,
            stride_vt, stride_vh, stride_gt, stride_gh, stride_bs, stride_bh,
        )  # fmt: skip
        b_max, b_sum, b_acc = _add(b_max, b_sum, b_acc, b_logit, b_value)
    b_max = tl.where(b_sum > 0, b_max, -float("inf"))
    tl.store(p_new_max + at_state, b_max, mask=m_state)
    tl.store(p_new_sum + at_state, b_sum, mask=m_state)
    tl.store(p_new_acc + at_state, b_acc, mask=m_state)


class Blocks(NamedTuple):
    """Tile of a program."""

    BLOCK_N: int  #: chunks
    BLOCK_H: int  #: heads
    BLOCK_D: int  #: channels of a head


def config(H: int, D: int, *, whole_heads: bool = False) -> Blocks:
    """Choose the tile: 1024 elements, of heads of at most 256 channels together.

    A norm or RoPE needs heads whole; otherwise a head of more than 512 channels is split.
    """
    H, D = int(H), int(D)  # a compiler that traces lengths as symbols takes these as they are
    block_d = triton.next_power_of_2(max(D, 2))
    if not whole_heads:
        block_d = min(block_d, 512)
    block_h = min(triton.next_power_of_2(max(H, 1)), max(256 // block_d, 1))
    return Blocks(max(_ELEMENTS // (block_h * block_d), 1), block_h, block_d)


def _grid(blocks: Blocks, N: int, H: int, D: int) -> tuple[int, ...]:
    return tuple(triton.cdiv(n, b) for n, b in zip((N, H, D), blocks, strict=True))


def _pairs(cos: Tensor | None) -> int:
    return 0 if cos is None else int(cos.shape[1])


class _Operands(NamedTuple):
    """Tensors whose channels are neighbours."""

    values: Tensor
    gate: Tensor | None
    slot_bias: Tensor | None

    @classmethod
    def of(cls, values: Tensor, gate: Tensor | None, slot_bias: Tensor | None) -> _Operands:
        def lined_up(x: Tensor) -> Tensor:
            return x if x.stride(2) == 1 else x.contiguous()

        return cls(
            lined_up(values),
            None if gate is None else lined_up(gate),
            None if slot_bias is None else lined_up(slot_bias),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the slot bias, then strides of rows and heads of all three."""
        strides = [n for x in self for n in ((0, 0) if x is None else x.stride()[:2])]
        return 0 if self.slot_bias is None else len(self.slot_bias), *strides


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
    """Return the entries [N, H, D].

    ``norm`` [D] weighs an RMSNorm of each entry; ``cos`` and ``sin`` float32 [N, P] then turn its
    last P pairs of neighbouring channels.
    """
    (N,), H = starts.shape, values.shape[1]
    D = values.shape[2] if before is None else values.shape[2] // 2
    out = values.new_empty(N, H, D)
    if out.numel() == 0:
        return out
    blocks = config(H, D, whole_heads=norm is not None or cos is not None)
    x = _Operands.of(values, gate, slot_bias)
    wrap_triton(pool_kernel)[_grid(blocks, N, H, D)](
        *x, before, starts, ends, rows, norm, cos, sin, out,
        N, H, *x.sizes, eps,
        D=int(D), PAIRS=_pairs(cos), **blocks._asdict(), num_warps=_WARPS,
    )  # fmt: skip
    return out


def pool_backward(
    grad: Tensor,
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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of values, gate, slot_bias and norm; None for those not given.

    Without ``rows``, T is the number of rows; with them a row that is nobody's gets zeros.
    """
    (N,), H = starts.shape, values.shape[1]
    D = values.shape[2] if before is None else values.shape[2] // 2
    T = len(values) if rows is None else len(rows)
    make = torch.empty if rows is None and N > 0 else torch.zeros
    shape, device = values.shape, values.device
    d_values = make(shape, dtype=values.dtype, device=device)
    d_logits = None
    if gate is not None or slot_bias is not None:
        dtype = torch.float32 if gate is None else gate.dtype
        d_logits = make(shape, dtype=dtype, device=device)
    blocks = config(H, D, whole_heads=norm is not None or cos is not None)
    grid = _grid(blocks, N, H, D)
    norm_parts = None
    if norm is not None:
        norm_parts = norm.new_empty(grid[0] * grid[1], D, dtype=torch.float32)
    x = _Operands.of(values, gate, slot_bias)
    if N > 0 and H * D > 0:
        wrap_triton(pool_backward_kernel)[grid](
            grad.contiguous(), *x, before, starts, ends, rows, norm, cos, sin,
            d_values, d_logits, norm_parts,
            T, N, H, *x.sizes, eps,
            D=int(D), PAIRS=_pairs(cos), **blocks._asdict(), num_warps=_WARPS,
        )  # fmt: skip
    d_bias = d_norm = None
    if slot_bias is not None and d_logits is not None:
        d_bias = _slot_bias_gradient(d_logits, slot_bias, before, starts, ends, rows)
    if norm is not None and norm_parts is not None:
        d_norm = norm_parts.sum(0).to(norm.dtype)
    return d_values, None if gate is None else d_logits, d_bias, d_norm


def _slot_bias_gradient(
    d_logits: Tensor,
    slot_bias: Tensor,
    before: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    rows: Tensor | None,
) -> Tensor:
    """Add up by slot in two stages, always in the same order."""
    (N,), (S, H, C) = starts.shape, slot_bias.shape
    D = C if before is None else C // 2
    splits = triton.cdiv(N, _CHUNKS_PER_SPLIT)
    parts = slot_bias.new_empty(splits, S, H, C, dtype=torch.float32)
    if parts.numel():
        blocks = config(H, D)
        _, of_heads, of_channels = _grid(blocks, N, H, D)
        wrap_triton(slot_bias_kernel)[(splits, of_heads, of_channels * (C // D))](
            d_logits, before, starts, ends, rows, parts, N, H, S,
            D=int(D), **blocks._asdict(), CHUNKS=_CHUNKS_PER_SPLIT, num_warps=_WARPS,
        )  # fmt: skip
    return parts.sum(0).to(slot_bias.dtype)


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
    """Return the states of N chunks after the tokens ``starts[i] .. ends[i] - 1``.

    A state is (maximum, sum, weighted sum) of the softmax, each float32 [N, H, D]; of no token:
    (-inf, 0, 0). ``slots`` int64 [N] is the slot of each first token.
    """
    N, H, D = weighted.shape
    new = torch.empty_like(weighted), torch.empty_like(weighted), torch.empty_like(weighted)
    if weighted.numel() == 0:
        return new
    blocks = config(H, D)
    x = _Operands.of(values, gate, slot_bias)
    wrap_triton(pool_state_kernel)[_grid(blocks, N, H, D)](
        *x, starts, ends, slots,
        highest.contiguous(), total.contiguous(), weighted.contiguous(), *new,
        N, H, *x.sizes,
        D=int(D), **blocks._asdict(), num_warps=_WARPS,
    )  # fmt: skip
    return new


def cases() -> Iterator[Case]:
    """Yield configurations of all kernels: head dims, dtypes, options."""
    for D, H in ((64, 8), (80, 4), (128, 8), (256, 1), (512, 1)):
        for options in ("mean", "gate+bias+overlap", "gate+bias+overlap+norm+rope"):
            yield from _cases(H, D, "bf16", options)
    yield from _cases(8, 128, "fp32", "gate+bias+overlap+norm+rope")


def _cases(H: int, D: int, dtype: str, options: str) -> Iterator[Case]:
    chosen = options.split("+")
    fused = "norm" in chosen or "rope" in chosen
    pairs = min(D // 2, 32) if "rope" in chosen else 0
    given = {
        "p_gate": "gate" in chosen,
        "p_bias": "bias" in chosen,
        "p_dlogits": "gate" in chosen or "bias" in chosen,
        "p_before": "overlap" in chosen,
        "p_norm": "norm" in chosen,
        "p_dnorm": "norm" in chosen,
        "p_cos": "rope" in chosen,
        "p_sin": "rope" in chosen,
        "p_rows": False,
    }
    words = f"D={D} H={H} {dtype} {options}"
    tile = config(H, D, whole_heads=fused)._asdict()
    constants = {"D": D, "PAIRS": pairs} | tile
    yield _case(pool_kernel, words, dtype, given, constants)
    yield _case(pool_backward_kernel, words, dtype, given, constants)
    if "bias" in chosen and not fused:
        constants = {"D": D} | config(H, D)._asdict()
        yield _case(pool_state_kernel, words, dtype, given, constants)
        constants["CHUNKS"] = _CHUNKS_PER_SPLIT
        yield _case(slot_bias_kernel, words, dtype, given, constants)


_KINDS = {
    "p_before p_starts p_ends p_rows p_slots": "*i64",
    "p_cos p_sin p_dnorm p_parts p_max p_sum p_acc p_new_max p_new_sum p_new_acc": "*fp32",
    "eps": "fp32",
}


def _case(
    kernel: Any, words: str, dtype: str, given: dict[str, bool], constants: dict[str, int]
) -> Case:
    kinds = {name: kind for names, kind in _KINDS.items() for name in names.split()}
    values: dict[str, Any] = {k: v for k, v in constants.items() if k in kernel.arg_names}
    values |= {k: None for k, here in given.items() if k in kernel.arg_names and not here}

    def kind(name: str) -> str:
        if name in values:
            return "constexpr"
        return kinds.get(name, f"*{dtype}" if name.startswith("p_") else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    divisible = tuple(name for name in kernel.arg_names if name.startswith("stride"))
    return Case(kernel, words, signature, values, _WARPS, 3, is_matmul=False, divisible=divisible)
