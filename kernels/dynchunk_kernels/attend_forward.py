"""The forward kernel of ``attend``: one online softmax over entries, raw tokens and a sink."""

from __future__ import annotations

import triton
import triton.language as tl

from dynchunk_kernels._attention import (
    LN_2,
    LOG2_E,
    WAYS,
    border_tile,
    dot,
    entry_runs,
    first_tile,
    is_bad_row,
    load_tile,
    narrow,
    raw_runs,
    rows_from,
    store_tile,
    tile_runs,
)


@triton.jit
def _add_tile(
    b_acc,
    b_max,
    b_sum,
    b_q,
    p_k,
    p_v,
    p_bias,
    stride_k,
    stride_v,
    stride_bias,
    b_low,
    b_high,
    start,
    end,
    bias_end,
    scale,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys from ``start`` on to each row's softmax. Logits are in powers of two."""
    o_n = tl.arange(0, BLOCK_N)
    m_n = start + o_n < end
    row = tl.cast(start, tl.int64)
    b_k = load_tile(p_k + row * stride_k, o_n * stride_k, m_n, D, BLOCK_D, MASKED)
    b_logit = dot(b_q, tl.trans(b_k), None, PRECISION) * (scale * LOG2_E)
    if HAS_BIAS:
        p_b = p_bias + row * stride_bias + o_n * stride_bias
        b_bias = tl.load(p_b, mask=start + o_n < bias_end, other=0.0)
        b_logit += (b_bias.to(tl.float32) * LOG2_E)[None, :]
    if MASKED:
        b_n = (start + o_n)[None, :]
        m_read = (b_n >= b_low[:, None]) & (b_n < b_high[:, None])
        b_logit = tl.where(m_read, b_logit, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_logit, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_logit - b_base[:, None])
    b_decay = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    if SHARED:
        b_v = b_k
    else:
        b_v = load_tile(p_v + row * stride_v, o_n * stride_v, m_n, D_V, BLOCK_V, MASKED)
    if MASKED:  # a value that is not finite reaches the rows that read it, and no other
        is_bad = is_bad_row(b_v)
        b_p = tl.where(m_read & is_bad[None, :], float("nan"), b_p)
        b_v = tl.where(is_bad[:, None], 0.0, b_v)
    b_acc = b_acc * b_decay[:, None]
    b_acc = dot(narrow(b_p, b_v.dtype), b_v, b_acc, PRECISION)
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["S", "B", "G", "H_KV"])
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_entry_k,
    p_entry_v,
    p_bias,
    p_sink,
    p_out,
    p_lse,
    p_cu_q,
    p_cu_k,
    p_cu_entries,
    p_n_visible,
    p_raw_start,
    scale,
    stride_q_s,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_entry_k_n,
    stride_entry_k_h,
    stride_entry_v_n,
    stride_entry_v_h,
    stride_bias_n,
    stride_bias_h,
    S,
    B,
    G,
    H_KV,
    R: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BORDER: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a tile of rows and KV head; the longest tiles of a sequence start first."""
    head = tl.program_id(1).to(tl.int64)
    view, own = head // (H_KV // G), head % (H_KV // G)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = -1  # the last sequence whose first tile is not after this one
    for start in range(0, B, WAYS):
        o_b = start + tl.arange(0, WAYS)
        b_first = first_tile(tl.load(p_cu_q + o_b, mask=o_b < B, other=0), o_b, R, BLOCK_M)
        b += tl.sum(((b_first <= i_tile) & (o_b < B)).to(tl.int32), 0)
    begin_q = tl.load(p_cu_q + b).to(tl.int64)
    n_q = (tl.load(p_cu_q + b + 1) - begin_q).to(tl.int32)
    first = (i_tile - first_tile(begin_q, b, R, BLOCK_M)) * BLOCK_M
    if first >= n_q * R:
        return
    begin_k = tl.load(p_cu_k + b).to(tl.int64)
    n_k = (tl.load(p_cu_k + b + 1) - begin_k).to(tl.int32)
    p_cu_entries += view * (B + 1) + b
    begin_e = tl.load(p_cu_entries).to(tl.int64)
    n_e = (tl.load(p_cu_entries + 1) - begin_e).to(tl.int32)
    first_query, b_query, b_head = rows_from(first, R, BLOCK_M)
    m_row = first_query + b_query < n_q
    query = begin_q + first_query

    p_q += query * stride_q_s + head * R * stride_q_h
    b_q = load_tile(p_q, b_query * stride_q_s + b_head * stride_q_h, m_row, D, BLOCK_D, True)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_SINK:
        b_max = tl.load(p_sink + head * R + b_head).to(tl.float32) * LOG2_E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    else:
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)

    p_entry_k += begin_e * stride_entry_k_n + own * stride_entry_k_h
    p_entry_v += begin_e * stride_entry_v_n + own * stride_entry_v_h
    p_bias += begin_e * stride_bias_n + own * stride_bias_h
    p_k += begin_k * stride_k_t + head * stride_k_h
    p_v += begin_k * stride_v_t + head * stride_v_h
    b_seen = entry_runs(p_n_visible + view * S + query, b_query, m_row, n_e)
    own_token = first_query + n_k - n_q
    b_low, b_high = raw_runs(p_raw_start + view * S + query, b_query, m_row, begin_k, own_token)
    begin_e, end_e, low_e, full_e, border_e = tile_runs(b_seen * 0, b_seen, m_row, BLOCK_N, BORDER)
    begin_r, end_r, low_r, full_r, border_r = tile_runs(b_low, b_high, m_row, BLOCK_N, BORDER)
    for i in range(full_e + full_r):
        is_entry = i < full_e
        b_acc, b_max, b_sum = _add_tile(
            b_acc, b_max, b_sum, b_q,
            tl.where(is_entry, p_entry_k, p_k),
            tl.where(is_entry, p_entry_v, p_v),
            p_bias,
            tl.where(is_entry, stride_entry_k_n, stride_k_t),
            tl.where(is_entry, stride_entry_v_n, stride_v_t),
            stride_bias_n,
            b_low,
            b_high,
            tl.where(is_entry, low_e, low_r - full_e * BLOCK_N) + i * BLOCK_N,
            tl.where(is_entry, end_e, end_r),
            tl.where(is_entry, end_e, 0),
            scale,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_V, HAS_BIAS, SHARED, PRECISION, False,
        )  # fmt: skip
    for i in range(border_e + border_r):
        is_entry = i < border_e
        b_acc, b_max, b_sum = _add_tile(
            b_acc, b_max, b_sum, b_q,
            tl.where(is_entry, p_entry_k, p_k),
            tl.where(is_entry, p_entry_v, p_v),
            p_bias,
            tl.where(is_entry, stride_entry_k_n, stride_k_t),
            tl.where(is_entry, stride_entry_v_n, stride_v_t),
            stride_bias_n,
            tl.where(is_entry, 0, b_low),
            tl.where(is_entry, b_seen, b_high),
            tl.where(
                is_entry,
                border_tile(i, begin_e, low_e, full_e, BLOCK_N, BORDER),
                border_tile(i - border_e, begin_r, low_r, full_r, BLOCK_N, BORDER),
            ),
            tl.where(is_entry, end_e, end_r),
            tl.where(is_entry, end_e, 0),
            scale,
            D, D_V, BORDER, BLOCK_D, BLOCK_V, HAS_BIAS, SHARED, PRECISION, True,
        )  # fmt: skip

    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    row, b_row = query * (H_KV * R) + head * R, b_query * (H_KV * R) + b_head
    store_tile(p_out + row * D_V, b_row * D_V, m_row, b_out, D_V, BLOCK_V)
    tl.store(p_lse + row + b_row, (b_max + tl.log2(b_sum)) * LN_2, mask=m_row)
