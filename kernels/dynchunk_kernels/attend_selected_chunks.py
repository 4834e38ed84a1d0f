"""Attention over the raw tokens of listed chunks and recent tokens: forward and backward.

Chunks have unequal sizes, tiles do not: a program takes the tokens of its listed chunks one after
another, so that a tile holds the end of one chunk, some whole ones and the start of another, and
only the last tile of a list is not full. Slot s of a list holds the token ``s + to_token[c]`` of
its chunk c, the last with ``before[c] <= s``: a binary search in a list of sums.

The listed tokens that all queries of a block read for being listed come first, without a mask for
each query. What follows is one run of tokens, from the first that a query of the block reads as
recent to the block's last: there each query has its mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
    finite,
    load_rows,
    load_values,
    store_rows,
    taint,
)
from dynchunk_kernels.offline import ARCHS, Case


@triton.jit
def _last_at_most(p_sorted, K, b_x):
    """Return the number of the last of K ascending values that is at most x, or -1."""
    b_low, b_high = b_x.to(tl.int32) * 0 - 1, b_x.to(tl.int32) * 0 + K
    size = K
    while size > 0:
        b_middle = b_low + (b_high - b_low) // 2
        is_open = b_middle > b_low
        b_value = tl.load(p_sorted + b_middle, mask=is_open, other=0)
        b_low = tl.where(is_open & (b_value <= b_x), b_middle, b_low)
        b_high = tl.where(is_open & (b_value > b_x), b_middle, b_high)
        size //= 2
    return b_low


@triton.jit
def _rows(begin, end, block, h, i_m, R: tl.constexpr, BLOCK_M: tl.constexpr, H: tl.constexpr):
    """Return (queries, rows of queries times heads, which there are, heads) of a tile."""
    b_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_t = begin + b_m // R
    m_row = (b_m < block * R) & (b_t < end)
    b_head = h * R + b_m % R
    return b_t, b_t * H + b_head, m_row, b_head


@triton.jit
def _listed_tokens(p_before, p_to_token, K, b_slot, m_n):
    """Return the tokens in slots of a list."""
    b_chunk = _last_at_most(p_before, K, b_slot)
    return b_slot + tl.load(p_to_token + b_chunk, mask=m_n, other=0)


@triton.jit
def _is_read(p_rows, p_start_of, K, b_n, m_n, b_own, b_raw, m_row):
    """Return which tokens of a run each query reads, [queries, tokens]."""
    b_start = tl.load(p_start_of + b_n, mask=m_n, other=-1).to(tl.int32)
    b_chunk = _last_at_most(p_rows, K, b_start)
    m_listed = m_n & (b_chunk >= 0)
    m_listed &= tl.load(p_rows + b_chunk, mask=m_listed, other=-1) == b_start
    m_s = (b_n[None, :] >= b_raw[:, None]) | m_listed[None, :]
    return m_s & (b_n[None, :] <= b_own[:, None]) & m_n[None, :] & m_row[:, None]


@triton.jit(do_not_specialize=["S", "T", "K", "block"])
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_sink,
    p_queries,
    p_own,
    p_raw_start,
    p_start_of,
    p_rows,
    p_before,
    p_to_token,
    p_run,
    p_out,
    p_lse,
    S,
    T,
    K,
    block,
    scale,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend with a tile of rows of one block of queries and one KV head."""
    R: tl.constexpr = H // H_KV
    i_list, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g = h // (H_KV // G)
    # Loaded here: to torch.compile, an address that depends on a load in a helper is a store to it.
    begin, end = tl.load(p_queries + 2 * i_list), tl.load(p_queries + 2 * i_list + 1)
    b_t, b_row, m_row, b_head = _rows(begin, end, block, h, tl.program_id(2), R, BLOCK_M, H)
    b_q = load_rows(p_q, b_row, m_row, D, BLOCK_D)
    b_max, b_sum = begin_softmax(p_sink, b_head, m_row, BLOCK_M, HAS_SINK)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_clean = tl.zeros([BLOCK_N], tl.float32)
    scale_log2 = scale * LOG2_E

    i_list = i_list * L + h * L // H_KV
    n, run = tl.load(p_run + 3 * i_list), tl.load(p_run + 3 * i_list + 1)
    for n0 in range(0, n.to(tl.int32), BLOCK_N):
        b_slot = n0 + tl.arange(0, BLOCK_N)
        m_n = b_slot < n
        b_n = _listed_tokens(p_before + i_list * K, p_to_token + i_list * K, K, b_slot, m_n)
        b_k = load_rows(p_k, b_n * H_KV + h, m_n, D, BLOCK_D)
        b_v = load_values(p_v, b_n * H_KV + h, m_n, b_k, D_V, BLOCK_V, SHARED)
        b_s = tl.where(m_n[None, :], dot(b_q, tl.trans(b_k)) * scale_log2, float("-inf"))
        b_max, b_sum, b_acc = add_keys(b_s, b_v, b_clean, b_max, b_sum, b_acc)

    b_own = tl.load(p_own + b_t, mask=m_row, other=-1)
    b_raw = tl.load(p_raw_start + g * S + b_t, mask=m_row, other=0)
    after = tl.load(p_run + 3 * i_list + 2)
    for n0 in range(run, after, BLOCK_N):
        b_n = n0 + tl.arange(0, BLOCK_N)
        m_n = b_n < after
        b_k = load_rows(p_k, b_n * H_KV + h, m_n, D, BLOCK_D)
        b_v = load_values(p_v, b_n * H_KV + h, m_n, b_k, D_V, BLOCK_V, SHARED)
        m_s = _is_read(p_rows + i_list * K, p_start_of + g * T, K, b_n, m_n, b_own, b_raw, m_row)
        b_s = tl.where(m_s, dot(b_q, tl.trans(b_k)) * scale_log2, float("-inf"))
        b_max, b_sum, b_acc = add_keys(b_s, finite(b_v), taint(b_v), b_max, b_sum, b_acc)
    end_softmax(p_out, p_lse, b_row, m_row, b_max, b_sum, b_acc, D_V, BLOCK_V)


@triton.jit(do_not_specialize=["S", "T", "K", "block"])
def query_gradients_kernel(
    p_q,
    p_k,
    p_v,
    p_queries,
    p_own,
    p_raw_start,
    p_start_of,
    p_rows,
    p_before,
    p_to_token,
    p_run,
    p_out,
    p_grad_out,
    p_lse,
    p_grad_lse,
    p_grad_q,
    p_shift,
    S,
    T,
    K,
    block,
    scale,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradient of a tile of rows of one block of queries, and the shift of its logits'."""
    R: tl.constexpr = H // H_KV
    i_list, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g = h // (H_KV // G)
    begin, end = tl.load(p_queries + 2 * i_list), tl.load(p_queries + 2 * i_list + 1)
    b_t, b_row, m_row, _ = _rows(begin, end, block, h, tl.program_id(2), R, BLOCK_M, H)
    b_q = load_rows(p_q, b_row, m_row, D, BLOCK_D)
    b_grad, b_lse, b_shift = begin_gradient(
        p_out, p_grad_out, p_lse, p_grad_lse, p_shift, b_row, m_row, D_V, BLOCK_V
    )
    b_grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_log2 = scale * LOG2_E

    i_list = i_list * L + h * L // H_KV
    n, run = tl.load(p_run + 3 * i_list), tl.load(p_run + 3 * i_list + 1)
    for n0 in range(0, n.to(tl.int32), BLOCK_N):
        b_slot = n0 + tl.arange(0, BLOCK_N)
        m_n = b_slot < n
        b_n = _listed_tokens(p_before + i_list * K, p_to_token + i_list * K, K, b_slot, m_n)
        b_k = load_rows(p_k, b_n * H_KV + h, m_n, D, BLOCK_D)
        b_v = load_values(p_v, b_n * H_KV + h, m_n, b_k, D_V, BLOCK_V, SHARED)
        b_s = dot(b_q, tl.trans(b_k)) * scale_log2
        b_grad_q = add_query_gradient(b_s, m_n[None, :], b_k, b_v, b_grad, b_lse, b_shift, b_grad_q)

    b_own = tl.load(p_own + b_t, mask=m_row, other=-1)
    b_raw = tl.load(p_raw_start + g * S + b_t, mask=m_row, other=0)
    after = tl.load(p_run + 3 * i_list + 2)
    for n0 in range(run, after, BLOCK_N):
        b_n = n0 + tl.arange(0, BLOCK_N)
        m_n = b_n < after
        b_k = load_rows(p_k, b_n * H_KV + h, m_n, D, BLOCK_D)
        b_v = load_values(p_v, b_n * H_KV + h, m_n, b_k, D_V, BLOCK_V, SHARED)
        m_s = _is_read(p_rows + i_list * K, p_start_of + g * T, K, b_n, m_n, b_own, b_raw, m_row)
        b_s = dot(b_q, tl.trans(b_k)) * scale_log2
        b_grad_q = add_query_gradient(b_s, m_s, finite(b_k), b_v, b_grad, b_lse, b_shift, b_grad_q)
    store_rows(p_grad_q, b_row, m_row, b_grad_q * scale, D, BLOCK_D)


def forward_config(arch: int, shape: Shape, block: int) -> Config:
    """Choose tiles for the forward with ``block`` queries to a list."""
    return _config(arch, shape, block, 2)


def query_config(arch: int, shape: Shape, block: int) -> Config:
    """Choose tiles for the gradient of queries."""
    return _config(arch, shape, block, 2)


def _config(arch: int, shape: Shape, block: int, stages: int) -> Config:
    if shape.dtype == torch.float32:
        return Config(16, 16, 8 if shape.width > 64 else 4, 1)
    if shape.width > 256 and (arch < 90 or not shape.SHARED):
        return Config(16, 16, 8, stages)
    rows = 64 if shape.width <= 128 and arch >= 90 else 32
    rows = min(rows, _selected.block(block * shape.group))
    return Config(rows, 32, 8 if shape.width > 128 else 4, stages)


class _Layout(NamedTuple):
    """Blocks of queries and what they read, for R lists and L groups of KV heads."""

    queries: Tensor  #: int64 [R, 2], the first query of each block and one past its last
    own: Tensor  #: int64 [S]
    raw_start: Tensor  #: int64 [G, S]
    start_of: Tensor  #: int64 [G, T], the first token of each token's chunk
    lists: _lists.Lists  #: chunks, by their first tokens
    before: Tensor  #: int32 [R, L, K], tokens in slots before each chunk of the list
    to_token: Tensor  #: int64 [R, L, K], from a slot of the chunk to its token
    run: Tensor  #: int64 [R, L, 3], tokens in slots; then begin and end of the run after them


def _layout(
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_chunks: Tensor,
    starts: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    block: int,
) -> _Layout:
    raw_start = raw_start.contiguous()
    own = _lists.own_rows(cu_seqlens_q, cu_seqlens_k, _lists.ids(cu_seqlens_q, raw_start.shape[1]))
    queries, sequence = _blocks(cu_seqlens_q, len(indices), block)
    first, last = _spans(cu_seqlens_k, cu_chunks, starts)
    start_of, end_of = _chunks_of_tokens(first, last, cu_chunks, len(k))

    view = torch.arange(len(cu_chunks), device=k.device)
    if indices.shape[1] > 1:
        view = view.repeat_interleave(k.shape[1] // len(cu_chunks))
    begin, end = (cu_chunks[view, n[:, None]][..., None] for n in (sequence, sequence + 1))
    chunk = indices + begin
    is_chunk = (indices >= 0) & (chunk < end)
    chunk = chunk.where(is_chunk, 0)
    lists = _lists.as_sets(first[chunk], is_chunk & (first[chunk] < last[chunk]))

    member = queries[:, :1] + torch.arange(block, device=k.device)
    member = torch.minimum(member, queries[:, 1:] - 1).clamp(min=0)
    run_begin = torch.minimum(raw_start[:, member].amin(-1), own[member[:, 0]] + 1)[view].T
    run_end = (own[member[:, -1]] + 1)[:, None].expand_as(run_begin)
    token = lists.rows.long().where(lists.is_row, 0)
    ends = torch.minimum(end_of[view[:, None], token], run_begin[..., None])
    length = (ends - token).clamp(min=0).where(lists.is_row, 0)
    total = length.cumsum(-1)
    before = total - length
    run = torch.stack([total[..., -1], run_begin, run_end], -1)
    return _Layout(queries, own, raw_start, start_of, lists, before.int(), lists.rows - before, run)


def _blocks(cu_seqlens_q: Tensor, n_blocks: int, block: int) -> tuple[Tensor, Tensor]:
    """Return (first query and one past the last, sequence) of each block."""
    counts = (cu_seqlens_q.diff() + block - 1) // block
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sequence = _lists.ids(offsets, n_blocks)
    index = torch.arange(n_blocks, device=sequence.device) - offsets[sequence]
    begin = cu_seqlens_q[sequence] + index * block
    end = torch.minimum(begin + block, cu_seqlens_q[sequence + 1])
    return torch.stack([begin, end], -1), sequence


def _spans(cu_seqlens_k: Tensor, cu_chunks: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of k that each of N chunks has, (first, one past the last) [N + 1]."""
    part = _lists.ids(torch.nn.functional.pad(cu_chunks[:, 1:].flatten(), (1, 0)), len(starts))
    sequence = part % max(len(cu_seqlens_k) - 1, 1)
    begin, end = cu_seqlens_k[sequence], cu_seqlens_k[sequence + 1]
    first = torch.minimum(torch.maximum(starts, begin), end)
    is_last = part != part.roll(-1)
    is_last[-1:] = True
    last = first.roll(-1).where(~is_last, end)
    return torch.nn.functional.pad(first, (0, 1)), torch.nn.functional.pad(last, (0, 1))


def _chunks_of_tokens(
    first: Tensor, last: Tensor, cu_chunks: Tensor, n_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return (first token, one past the last) of the chunk of each token, [G, T] and [G, T + 1]."""
    views, n = len(cu_chunks), len(first) - 1
    token = torch.arange(n_tokens, device=first.device)
    shift = torch.arange(views, device=first.device) * (n_tokens + 1)  # one view after another
    key = first[:n] + shift[_lists.ids(torch.nn.functional.pad(cu_chunks[:, -1], (1, 0)), n)]
    chunk = torch.searchsorted(key, token + shift[:, None], right=True) - 1
    return first[chunk], torch.nn.functional.pad(last[chunk], (0, 1))


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
    """Return (out [S, H, D_v], lse [S, H]).

    Parameters
    ----------
    q, k, v, sink
        Tensors [S, H, D], [T, H_kv, D], [T, H_kv, D_v] or None, [H] or None. Without values the
        keys are the values.
    cu_seqlens_q, cu_seqlens_k, cu_chunks, starts, raw_start
        Integer tensors [B+1], [B+1], [G, B+1], [N], [G, S]: where chunks are, and recent tokens.
    indices : integer tensor [R, 1 or H_kv, K]
        Chunks, counted from the sequence's first, that each block of queries reads.
    block : int
        Queries that share a list.
    scale : float
    """
    dtype = q.dtype
    q, k, v = _selected.alike(q, k, v)
    of = _layout(k, cu_seqlens_q, cu_seqlens_k, cu_chunks, starts, raw_start, indices, block)
    shape = Shape.of(q, k, v, len(cu_chunks), of.lists.rows.shape[1])
    config = forward_config(arch_of(q), shape, block)
    out = q.new_empty(*q.shape[:2], shape.D_V, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    wrap_triton(forward_kernel)[_grid(indices, shape, config, block)](
        q,
        k,
        dense(v, k),
        dense(sink, q),
        of.queries,
        of.own,
        of.raw_start,
        of.start_of,
        of.lists.rows,
        of.before,
        of.to_token,
        of.run,
        out,
        lse,
        len(q),
        len(k),
        of.lists.rows.shape[2],
        block,
        scale,
        **shape.constants(),
        HAS_SINK=sink is not None,
        **config._asdict(),
    )
    return out, lse


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
    """Return the gradients of q, k, v and sink; an empty one for None."""
    given = q, k, v, sink
    q, k, v = _selected.alike(q, k, v)
    grad_out, out = grad_out.to(q.dtype).contiguous(), out.contiguous()
    grad_lse, lse = grad_lse.contiguous(), lse.contiguous()
    of = _layout(k, cu_seqlens_q, cu_seqlens_k, cu_chunks, starts, raw_start, indices, block)
    shape = Shape.of(q, k, v, len(cu_chunks), of.lists.rows.shape[1])
    shape.require_gradients()
    config = query_config(arch_of(q), shape, block)
    grad_q, shift = torch.empty_like(q), torch.empty_like(lse)
    wrap_triton(query_gradients_kernel)[_grid(indices, shape, config, block)](
        q,
        k,
        dense(v, k),
        of.queries,
        of.own,
        of.raw_start,
        of.start_of,
        of.lists.rows,
        of.before,
        of.to_token,
        of.run,
        out,
        grad_out,
        lse,
        grad_lse,
        grad_q,
        shift,
        len(q),
        len(k),
        of.lists.rows.shape[2],
        block,
        scale,
        **shape.constants(),
        **config._asdict(),
    )
    grad_k, grad_v, _ = _selected.key_gradients(
        q,
        k,
        v,
        None,
        grad_out,
        lse,
        shift,
        shape,
        scale,
        recent=_lists.recent(cu_seqlens_q, cu_seqlens_k, of.raw_start, len(k)),
        raw_start=of.raw_start,
        lists=of.lists,
        start_of=of.start_of,
        queries=of.queries,
        block=block,
    )
    grads = grad_q, grad_k, grad_v, _selected.sink_gradient(sink, lse, shift)
    return tuple(
        q.new_empty(0) if x is None or grad is None else grad.to(x.dtype)
        for x, grad in zip(given, grads, strict=True)
    )


def _grid(indices: Tensor, shape: Shape, config: Config, block: int) -> tuple[int, int, int]:
    return len(indices), shape.H_KV, triton.cdiv(block * shape.group, config.BLOCK_M)


def cases() -> Iterator[Case]:
    """Yield the configurations of the kernels, for the check of their machine code."""
    for arch in ARCHS:
        for shape in _selected.shapes():
            for config in dict.fromkeys(forward_config(arch, shape, block) for block in (1, 64)):
                yield _selected.case(forward_kernel, arch, shape, config, HAS_SINK=True)
            if not shape.has_gradients:
                continue
            for config in dict.fromkeys(query_config(arch, shape, block) for block in (1, 64)):
                yield _selected.case(query_gradients_kernel, arch, shape, config)
            yield from _selected.key_cases(arch, shape, RECENT=True, LISTED=True)
