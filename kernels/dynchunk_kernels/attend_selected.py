"""Attention over entries listed for each query, raw tokens and a sink: forward and backward.

A program has one query and one KV head. It walks the query's sorted list, then its raw tokens, and
reads both where they lie. Gradients of keys and values belong to the keys' tiles, which go through
their readers in a fixed order: no atomics, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels import _lists, _selected
from dynchunk_kernels._attention import LOG2_E
from dynchunk_kernels._launch import arch_of
from dynchunk_kernels._selected import (
    Config,
    Shape,
    add_keys,
    add_query_gradient,
    begin_gradient,
    begin_softmax,
    dense,
    dot,
    end_softmax,
    load_rows,
    load_values,
    store_rows,
)
from dynchunk_kernels.offline import ARCHS, Case

NONE = tl.constexpr(_lists.NONE)


@triton.jit
def _load_entries(
    p_entry_k,
    p_entry_v,
    p_bias,
    p_rows,
    o,
    n,
    own_head,
    PER_VIEW: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Load the entries at ``o`` of a list of ``n``: (which there are, keys, values, bias)."""
    b_row = tl.load(p_rows + o, mask=o < n, other=NONE)
    m_n = b_row != NONE
    b_row = b_row.to(tl.int64) * PER_VIEW + own_head
    b_k = load_rows(p_entry_k, b_row, m_n, D, BLOCK_D)
    b_v = load_values(p_entry_v, b_row, m_n, b_k, D_V, BLOCK_V, SHARED)
    b_bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + b_row, mask=m_n, other=0.0).to(tl.float32) * LOG2_E
    return m_n, b_k, b_v, b_bias


@triton.jit(do_not_specialize=["S", "K"])
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_entry_k,
    p_entry_v,
    p_bias,
    p_sink,
    p_rows,
    p_count,
    p_own,
    p_raw_start,
    p_out,
    p_lse,
    S,
    K,
    scale,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend with a tile of the query heads of one query and KV head."""
    R: tl.constexpr = H // H_KV
    PER_VIEW: tl.constexpr = H_KV // G
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_r = b_r < R
    b_head = h * R + b_r
    b_q = load_rows(p_q, t * H + b_head, m_r, D, BLOCK_D)
    b_max, b_sum = begin_softmax(p_sink, b_head, m_r, BLOCK_M, HAS_SINK)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_clean = tl.zeros([BLOCK_N], tl.float32)
    scale_log2 = scale * LOG2_E

    i_list = t * L + h * L // H_KV
    n = tl.load(p_count + i_list)
    for n0 in range(0, n, BLOCK_N):
        m_n, b_k, b_v, b_bias = _load_entries(
            p_entry_k,
            p_entry_v,
            p_bias,
            p_rows + i_list * K,
            n0 + tl.arange(0, BLOCK_N),
            n,
            h % PER_VIEW,
            PER_VIEW,
            D,
            D_V,
            SHARED,
            HAS_BIAS,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
        )
        b_s = dot(b_q, tl.trans(b_k)) * scale_log2 + b_bias[None, :]
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_max, b_sum, b_acc = add_keys(b_s, b_v, b_clean, b_max, b_sum, b_acc)

    after = tl.load(p_own + t) + 1
    for n0 in range(tl.load(p_raw_start + h // PER_VIEW * S + t), after, BLOCK_N):
        b_n = n0 + tl.arange(0, BLOCK_N)
        m_n = b_n < after
        b_k = load_rows(p_k, b_n * H_KV + h, m_n, D, BLOCK_D)
        b_v = load_values(p_v, b_n * H_KV + h, m_n, b_k, D_V, BLOCK_V, SHARED)
        b_s = dot(b_q, tl.trans(b_k)) * scale_log2
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_max, b_sum, b_acc = add_keys(b_s, b_v, b_clean, b_max, b_sum, b_acc)
    end_softmax(p_out, p_lse, t * H + b_head, m_r, b_max, b_sum, b_acc, D_V, BLOCK_V)


@triton.jit(do_not_specialize=["S", "K"])
def query_gradients_kernel(
    p_q,
    p_k,
    p_v,
    p_entry_k,
    p_entry_v,
    p_bias,
    p_rows,
    p_count,
    p_own,
    p_raw_start,
    p_out,
    p_grad_out,
    p_lse,
    p_grad_lse,
    p_grad_q,
    p_shift,
    S,
    K,
    scale,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradient of a tile of the query heads of one query, and the shift of its logits'."""
    R: tl.constexpr = H // H_KV
    PER_VIEW: tl.constexpr = H_KV // G
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_r = b_r < R
    b_head = t * H + h * R + b_r
    b_q = load_rows(p_q, b_head, m_r, D, BLOCK_D)
    b_grad, b_lse, b_shift = begin_gradient(
        p_out, p_grad_out, p_lse, p_grad_lse, p_shift, b_head, m_r, D_V, BLOCK_V
    )
    b_grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_log2 = scale * LOG2_E

    i_list = t * L + h * L // H_KV
    n = tl.load(p_count + i_list)
    for n0 in range(0, n, BLOCK_N):
        m_n, b_k, b_v, b_bias = _load_entries(
            p_entry_k,
            p_entry_v,
            p_bias,
            p_rows + i_list * K,
            n0 + tl.arange(0, BLOCK_N),
            n,
            h % PER_VIEW,
            PER_VIEW,
            D,
            D_V,
            SHARED,
            HAS_BIAS,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
        )
        b_s = dot(b_q, tl.trans(b_k)) * scale_log2 + b_bias[None, :]
        b_grad_q = add_query_gradient(b_s, m_n[None, :], b_k, b_v, b_grad, b_lse, b_shift, b_grad_q)

    after = tl.load(p_own + t) + 1
    for n0 in range(tl.load(p_raw_start + h // PER_VIEW * S + t), after, BLOCK_N):
        b_n = n0 + tl.arange(0, BLOCK_N)
        m_n = b_n < after
        b_k = load_rows(p_k, b_n * H_KV + h, m_n, D, BLOCK_D)
        b_v = load_values(p_v, b_n * H_KV + h, m_n, b_k, D_V, BLOCK_V, SHARED)
        b_s = dot(b_q, tl.trans(b_k)) * scale_log2
        b_grad_q = add_query_gradient(b_s, m_n[None, :], b_k, b_v, b_grad, b_lse, b_shift, b_grad_q)
    store_rows(p_grad_q, b_head, m_r, b_grad_q * scale, D, BLOCK_D)


def forward_config(arch: int, shape: Shape) -> Config:
    """Choose tiles for the forward."""
    rows = 64 if arch >= (100 if shape.width > 256 else 90) else 32
    return _config(shape, rows, 2)


def query_config(arch: int, shape: Shape) -> Config:
    """Choose tiles for the gradient of queries."""
    return _config(shape, 64 if shape.width < 512 else 32, 3 if shape.width <= 128 else 2)


def _config(shape: Shape, rows: int, stages: int) -> Config:
    if shape.dtype == torch.float32:
        return Config(16, 16, 8 if shape.width > 64 else 4, 1)
    rows = min(rows, _selected.block(shape.group))
    return Config(rows, 32, 8 if shape.width > 128 else 4, stages)


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
    """Return (out [S, H, D_v], lse [S, H]).

    Parameters
    ----------
    q, k, v, entry_k, entry_v, bias, sink
        Tensors [S, H, D], [T, H_kv, D], [T, H_kv, D_v] or None, [N, H_kv / G, D], [N, H_kv / G,
        D_v] or None, [N, H_kv / G] or None, [H] or None. Without values the keys are the values.
    cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start
        Integer tensors [B+1], [B+1], [G, B+1], [G, S], [G, S]: what each query may read.
    indices : integer tensor [S, 1 or H_kv, K]
        Entries that it reads of those, counted from its sequence's first.
    scale : float

    Notes
    -----
    Making sets of the lists costs one sort of S * K integers (times G, or H_kv where each KV head
    has its own lists): a few per cent of the attention itself where a KV head has many query heads.
    """
    dtype = q.dtype
    q, k, v, entry_k, entry_v = _selected.alike(q, k, v, entry_k, entry_v)
    bias = None if bias is None else bias.contiguous()
    lists, own, raw_start = _layout(
        cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start, indices, k
    )
    shape = Shape.of(q, k, v, len(cu_entries), lists.rows.shape[1])
    config = forward_config(arch_of(q), shape)
    out = q.new_empty(*q.shape[:2], shape.D_V, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    wrap_triton(forward_kernel)[_grid(q, shape, config)](
        q,
        k,
        dense(v, k),
        entry_k,
        dense(entry_v, entry_k),
        dense(bias, q),
        dense(sink, q),
        lists.rows,
        lists.lengths,
        own,
        raw_start,
        out,
        lse,
        len(q),
        lists.rows.shape[2],
        scale,
        **shape.constants(),
        HAS_BIAS=bias is not None,
        HAS_SINK=sink is not None,
        **config._asdict(),
    )
    return out, lse


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
    """Return the gradients of q, k, v, entry_k, entry_v, bias and sink; an empty one for None.

    Notes
    -----
    The lists are inverted: one stable sort of S * K integers for each group of lists, and about
    40 bytes for each of them while it runs.
    """
    given = q, k, v, entry_k, entry_v, bias, sink
    q, k, v, entry_k, entry_v = _selected.alike(q, k, v, entry_k, entry_v)
    bias = None if bias is None else bias.contiguous()
    grad_out, out = grad_out.to(q.dtype).contiguous(), out.contiguous()
    grad_lse, lse = grad_lse.contiguous(), lse.contiguous()
    lists, own, raw_start = _layout(
        cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start, indices, k
    )
    shape = Shape.of(q, k, v, len(cu_entries), lists.rows.shape[1])
    shape.require_gradients()
    config = query_config(arch_of(q), shape)
    grad_q, shift = torch.empty_like(q), torch.empty_like(lse)
    wrap_triton(query_gradients_kernel)[_grid(q, shape, config)](
        q,
        k,
        dense(v, k),
        entry_k,
        dense(entry_v, entry_k),
        dense(bias, q),
        lists.rows,
        lists.lengths,
        own,
        raw_start,
        out,
        grad_out,
        lse,
        grad_lse,
        grad_q,
        shift,
        len(q),
        lists.rows.shape[2],
        scale,
        **shape.constants(),
        HAS_BIAS=bias is not None,
        **config._asdict(),
    )
    rows = grad_out, lse, shift, shape, scale
    grad_k, grad_v, _ = _selected.key_gradients(
        q,
        k,
        v,
        None,
        *rows,
        recent=_lists.recent(cu_seqlens_q, cu_seqlens_k, raw_start, len(k)),
        raw_start=raw_start,
    )
    grad_entry_k, grad_entry_v, grad_bias = _selected.key_gradients(
        q,
        entry_k,
        entry_v,
        bias,
        *rows,
        bounds=cu_entries[:, [0, -1]],
        lists=lists,
    )
    grad_sink = _selected.sink_gradient(sink, lse, shift)
    grads = grad_q, grad_k, grad_v, grad_entry_k, grad_entry_v, grad_bias, grad_sink
    return tuple(
        q.new_empty(0) if x is None or grad is None else grad.to(x.dtype)
        for x, grad in zip(given, grads, strict=True)
    )


def _layout(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    k: Tensor,
) -> tuple[_lists.Lists, Tensor, Tensor]:
    """Return (lists of rows of entries, each query's own row of k, raw_start)."""
    views, n_queries = n_visible.shape
    sequence = _lists.ids(cu_seqlens_q, n_queries)
    own = _lists.own_rows(cu_seqlens_q, cu_seqlens_k, sequence)
    first, seen = cu_entries[:, sequence], n_visible
    if indices.shape[1] > 1:
        first, seen = (x.repeat_interleave(k.shape[1] // views, 0) for x in (first, seen))
    first, seen = first.T[..., None], seen.T[..., None]  # [S, G or H_kv, 1]
    is_seen = (indices >= 0) & (indices < seen)
    return _lists.as_sets(indices + first, is_seen), own, raw_start.contiguous()


def _grid(q: Tensor, shape: Shape, config: Config) -> tuple[int, int, int]:
    return len(q), shape.H_KV, triton.cdiv(shape.group, config.BLOCK_M)


def cases() -> Iterator[Case]:
    """Yield the configurations of the kernels, for the check of their machine code."""
    for arch in ARCHS:
        for shape in _selected.shapes():
            bias = {"HAS_BIAS": True}
            config = forward_config(arch, shape)
            yield _selected.case(forward_kernel, arch, shape, config, HAS_SINK=True, **bias)
            if not shape.has_gradients:
                continue
            config = query_config(arch, shape)
            yield _selected.case(query_gradients_kernel, arch, shape, config, **bias)
            yield from _selected.key_cases(arch, shape, RECENT=True)
            yield from _selected.key_cases(arch, shape, ENTRIES=True, LISTED=True, **bias)
