"""The backward kernels of ``attend``: weights are computed anew from the log of their sum.

With p the weight of a key and g the gradient of a row's output, the gradient of a logit is
p (g . v + shift), shift = grad_lse - g . out. ``queries_kernel`` adds these up over the keys of a
row, ``keys_kernel`` over the rows of a key. No order depends on timing: results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dynchunk_kernels._attention import (
    LOG2_E,
    WAYS,
    border_tile,
    dot,
    entry_runs,
    first_at_least,
    first_tile,
    is_bad_row,
    load_tile,
    narrow,
    raw_runs,
    rows_from,
    split,
    store_tile,
    tile_runs,
)


@triton.jit(do_not_specialize=["S"])
def shift_kernel(
    p_grad,
    p_grad_lse,
    p_out,
    p_shift,
    stride_grad_s,
    stride_grad_h,
    stride_lse_s,
    stride_lse_h,
    S,
    H: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write grad_lse - grad . out of each query and head."""
    b_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = b_row < S * H
    b_query, b_head = b_row // H, b_row % H
    b_offset = b_query * stride_grad_s + b_head * stride_grad_h
    b_grad = load_tile(p_grad, b_offset, m_row, D_V, BLOCK_V, True).to(tl.float32)
    b_out = load_tile(p_out, b_row * D_V, m_row, D_V, BLOCK_V, True).to(tl.float32)
    p_lse = p_grad_lse + b_query * stride_lse_s + b_head * stride_lse_h
    b_lse = tl.load(p_lse, mask=m_row, other=0.0).to(tl.float32)
    tl.store(p_shift + b_row, b_lse - tl.sum(b_grad * b_out, 1), mask=m_row)


@triton.jit
def _load_log_sum(p_lse, b_offset, m_row):
    """Return the log of each row's sum in powers of two; infinite where all weights are zero."""
    b_lse = tl.load(p_lse + b_offset, mask=m_row, other=float("-inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)


@triton.jit
def _add_key_tile(
    b_dq,
    b_q,
    b_grad,
    b_lse,
    b_shift,
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
    """Add what the keys from ``start`` on give to the rows' gradients."""
    o_n = tl.arange(0, BLOCK_N)
    m_n = start + o_n < end
    row = tl.cast(start, tl.int64)
    b_k = load_tile(p_k + row * stride_k, o_n * stride_k, m_n, D, BLOCK_D, MASKED)
    if SHARED:
        b_v = b_k
    else:
        b_v = load_tile(p_v + row * stride_v, o_n * stride_v, m_n, D_V, BLOCK_V, MASKED)
    b_logit = dot(b_q, tl.trans(b_k), None, PRECISION) * (scale * LOG2_E)
    if HAS_BIAS:
        p_b = p_bias + row * stride_bias + o_n * stride_bias
        b_bias = tl.load(p_b, mask=start + o_n < bias_end, other=0.0)
        b_logit += (b_bias.to(tl.float32) * LOG2_E)[None, :]
    b_p = tl.exp2(b_logit - b_lse[:, None])
    b_ds = b_p * (dot(b_grad, tl.trans(b_v), None, PRECISION) + b_shift[:, None])
    if MASKED:
        b_n = (start + o_n)[None, :]
        m_read = (b_n >= b_low[:, None]) & (b_n < b_high[:, None])
        is_bad = is_bad_row(b_k)
        b_ds = tl.where(m_read, tl.where(is_bad[None, :], float("nan"), b_ds), 0.0)
        b_k = tl.where(is_bad[:, None], 0.0, b_k)
    return dot(narrow(b_ds, b_k.dtype), b_k, b_dq, PRECISION)


@triton.jit(do_not_specialize=["S", "B", "G", "H_KV"])
def queries_kernel(
    p_q,
    p_k,
    p_v,
    p_entry_k,
    p_entry_v,
    p_bias,
    p_grad,
    p_lse,
    p_shift,
    p_dq,
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
    stride_grad_s,
    stride_grad_h,
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
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the queries: one program a tile of rows and KV head, as in the forward."""
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
    p_grad += query * stride_grad_s + head * R * stride_grad_h
    b_offset = b_query * stride_grad_s + b_head * stride_grad_h
    b_grad = load_tile(p_grad, b_offset, m_row, D_V, BLOCK_V, True)
    row, b_row = query * (H_KV * R) + head * R, b_query * (H_KV * R) + b_head
    b_lse = _load_log_sum(p_lse + row, b_row, m_row)
    b_shift = tl.load(p_shift + row + b_row, mask=m_row, other=0.0)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

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
        b_dq = _add_key_tile(
            b_dq, b_q, b_grad, b_lse, b_shift,
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
        b_dq = _add_key_tile(
            b_dq, b_q, b_grad, b_lse, b_shift,
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

    store_tile(p_dq + row * D, b_row * D, m_row, b_dq * scale, D, BLOCK_D)


@triton.jit
def _add_row_tile(
    b_dk,
    b_dv,
    b_dbias,
    b_k,
    b_v,
    b_bias,
    p_q,
    p_grad,
    p_lse,
    p_shift,
    p_run,
    stride_q_s,
    stride_q_h,
    stride_grad_s,
    stride_grad_h,
    n_heads,
    start,
    end,
    first_key,
    begin_k,
    n_before,
    scale,
    R: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTRIES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what the rows from ``start`` on give to the keys' gradients.

    Pointers are those of the sequence's first query. Its token comes ``n_before`` after the first.
    """
    first_query, b_query, b_head = rows_from(start, R, BLOCK_M)
    m_row = start + tl.arange(0, BLOCK_M) < end
    query = tl.cast(first_query, tl.int64)
    b_offset = b_query * stride_q_s + b_head * stride_q_h
    b_q = load_tile(p_q + query * stride_q_s, b_offset, m_row, D, BLOCK_D, MASKED)
    b_offset = b_query * stride_grad_s + b_head * stride_grad_h
    b_grad = load_tile(p_grad + query * stride_grad_s, b_offset, m_row, D_V, BLOCK_V, MASKED)
    b_row = b_query * n_heads + b_head
    b_lse = _load_log_sum(p_lse + query * n_heads, b_row, m_row)
    b_shift = tl.load(p_shift + query * n_heads + b_row, mask=m_row, other=0.0)
    b_logit = dot(b_k, tl.trans(b_q), None, PRECISION) * (scale * LOG2_E)
    if HAS_BIAS:
        b_logit += b_bias[:, None]
    b_p = tl.exp2(b_logit - b_lse[None, :])
    b_ds = b_p * (dot(b_v, tl.trans(b_grad), None, PRECISION) + b_shift[None, :])
    if MASKED:
        b_key = first_key + tl.arange(0, BLOCK_N)[:, None]
        b_run = tl.load(p_run + query + b_query, mask=m_row, other=0)
        if ENTRIES:
            m_read = b_key < b_run.to(tl.int32)[None, :]
        else:
            b_own = n_before + first_query + b_query
            m_read = (b_key >= (b_run - begin_k).to(tl.int32)[None, :]) & (b_key <= b_own[None, :])
            m_read &= m_row[None, :]
        is_bad = is_bad_row(b_q)
        b_p = tl.where(m_read, b_p, 0.0)
        b_ds = tl.where(m_read, tl.where(is_bad[None, :], float("nan"), b_ds), 0.0)
        b_q = tl.where(is_bad[:, None], 0.0, b_q)
    if HAS_BIAS:
        b_dbias += tl.sum(b_ds, 1)
    b_ds = narrow(b_ds * scale, b_q.dtype)
    b_p = narrow(b_p, b_grad.dtype)
    if SHARED:
        b_dk = dot(b_p, b_grad, b_dk, PRECISION)
    else:
        b_dv = dot(b_p, b_grad, b_dv, PRECISION)
    b_dk = dot(b_ds, b_q, b_dk, PRECISION)
    return b_dk, b_dv, b_dbias


@triton.jit(do_not_specialize=["N", "S", "B", "G", "H_KV"])
def keys_kernel(
    p_q,
    p_k,
    p_v,
    p_bias,
    p_grad,
    p_lse,
    p_shift,
    p_dk,
    p_dv,
    p_dbias,
    p_cu_q,
    p_cu_k,
    p_run,
    scale,
    stride_q_s,
    stride_q_h,
    stride_k_n,
    stride_k_h,
    stride_v_n,
    stride_v_h,
    stride_bias_n,
    stride_bias_h,
    stride_grad_s,
    stride_grad_h,
    N,
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
    ENTRIES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the keys: one program a tile of keys, KV head and share of the rows.

    The keys are entries (``p_cu_k`` has their offsets, ``p_run`` has ``n_visible``) or raw tokens
    (``p_run`` has ``raw_start``). Results are [share of the rows, N, heads, ..].
    """
    head = tl.program_id(1).to(tl.int64)
    n_kv = H_KV // G if ENTRIES else H_KV
    view, own = head // (H_KV // G), head % n_kv
    p_run += view * S
    if ENTRIES:
        p_cu_k += view * (B + 1)
    i_tile = tl.program_id(0)
    base = tl.load(p_cu_k)
    b = -1  # the last sequence whose first tile is not after this one
    for start in range(0, B, WAYS):
        o_b = start + tl.arange(0, WAYS)
        b_offset = tl.load(p_cu_k + o_b, mask=o_b < B, other=0) - base
        b_first = first_tile(b_offset, o_b, 1, BLOCK_N)
        b += tl.sum(((b_first <= i_tile) & (o_b < B)).to(tl.int32), 0)
    begin_k = tl.load(p_cu_k + b).to(tl.int64)
    n_k = (tl.load(p_cu_k + b + 1) - begin_k).to(tl.int32)
    first = (i_tile - first_tile(begin_k - base, b, 1, BLOCK_N)) * BLOCK_N
    if first >= n_k:
        return
    begin_q = tl.load(p_cu_q + b).to(tl.int64)
    n_q = (tl.load(p_cu_q + b + 1) - begin_q).to(tl.int32)
    last = tl.minimum(first + BLOCK_N, n_k) - 1

    # The queries that read some key of the tile, and those that read all of them.
    p_run += begin_q
    n_before = n_k - n_q
    if ENTRIES:
        begin, end = first_at_least(p_run, n_q, first + 1), n_q
        full_begin, full_end = first_at_least(p_run, n_q, last + 1), n_q
    else:
        begin, end = first - n_before, first_at_least(p_run, n_q, begin_k + last + 1)
        full_begin, full_end = last - n_before, first_at_least(p_run, n_q, begin_k + first + 1)
        begin = tl.maximum(begin, 0)
    # This program's share of their rows.
    n_tiles = tl.cdiv(tl.maximum(end - begin, 0) * R, BLOCK_M)
    n_rows = tl.cdiv(n_tiles, tl.num_programs(2)) * BLOCK_M
    begin_row = begin * R + tl.program_id(2) * n_rows
    end_row = tl.minimum(begin_row + n_rows, end * R)
    low, n_full, n_border = split(begin_row, end_row, full_begin * R, full_end * R, BLOCK_M, BORDER)

    o_n = tl.arange(0, BLOCK_N)
    m_key = first + o_n < n_k
    key = begin_k + first
    p_k += key * stride_k_n + own * stride_k_h
    b_k = load_tile(p_k, o_n * stride_k_n, m_key, D, BLOCK_D, True)
    if SHARED:
        b_v = b_k
    else:
        p_v += key * stride_v_n + own * stride_v_h
        b_v = load_tile(p_v, o_n * stride_v_n, m_key, D_V, BLOCK_V, True)
    b_bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        p_bias += key * stride_bias_n + own * stride_bias_h
        p_bias += o_n * stride_bias_n
        b_bias += tl.load(p_bias, mask=m_key, other=0.0).to(tl.float32) * LOG2_E
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, 1 if SHARED else BLOCK_V], tl.float32)
    b_dbias = tl.zeros([BLOCK_N], tl.float32)

    p_q += begin_q * stride_q_s + head * R * stride_q_h
    p_grad += begin_q * stride_grad_s + head * R * stride_grad_h
    n_heads = H_KV * R
    p_lse += begin_q * n_heads + head * R
    p_shift += begin_q * n_heads + head * R
    for i in range(n_full):
        b_dk, b_dv, b_dbias = _add_row_tile(
            b_dk, b_dv, b_dbias, b_k, b_v, b_bias, p_q, p_grad, p_lse, p_shift, p_run,
            stride_q_s, stride_q_h, stride_grad_s, stride_grad_h, n_heads,
            low + i * BLOCK_M, end_row, first, begin_k, n_before, scale,
            R, D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            ENTRIES, HAS_BIAS, SHARED, PRECISION, False,
        )  # fmt: skip
    for i in range(n_border):
        b_dk, b_dv, b_dbias = _add_row_tile(
            b_dk, b_dv, b_dbias, b_k, b_v, b_bias, p_q, p_grad, p_lse, p_shift, p_run,
            stride_q_s, stride_q_h, stride_grad_s, stride_grad_h, n_heads,
            border_tile(i, begin_row, low, n_full, BLOCK_M, BORDER),
            end_row, first, begin_k, n_before, scale,
            R, D, D_V, BORDER, BLOCK_N, BLOCK_D, BLOCK_V,
            ENTRIES, HAS_BIAS, SHARED, PRECISION, True,
        )  # fmt: skip

    row = (tl.program_id(2).to(tl.int64) * N + key) * n_kv + own
    store_tile(p_dk + row * D, o_n * (n_kv * D), m_key, b_dk, D, BLOCK_D)
    if not SHARED:
        store_tile(p_dv + row * D_V, o_n * (n_kv * D_V), m_key, b_dv, D_V, BLOCK_V)
    if HAS_BIAS:
        tl.store(p_dbias + row + o_n * n_kv, b_dbias, mask=m_key)
