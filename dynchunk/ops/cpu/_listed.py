"""Attention of queries that read lists of their own, in numba: one query after another.

All heads of a KV head are the rows of a tile. Listed rows are read where they lie: there is no
other query to share a copy with, and none that must not see them, so that nothing is masked.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from dynchunk.ops._attention import Operands
from dynchunk.ops.cpu import fast, jit
from dynchunk.ops.cpu._arrays import Array, flat, sinks_of
from dynchunk.ops.cpu._numeric import LOG2_E
from dynchunk.ops.cpu._softmax import absorb_row, merge
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu._tiles import ROWS, add_weighted, dots, widen

_TILE = 64  # rows whose logits are there at once


def attend_entries(
    x: Operands,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of queries [S, H, D] with lists [S, 1 or H_kv, K] of entries."""
    first = _of_query(cu_entries[:, :-1], cu_seqlens_q)
    where = [_own_tokens(cu_seqlens_q, cu_seqlens_k), first, n_visible, raw_start, indices]
    entry_v = x.entry_k if x.entry_v is None else x.entry_v
    bias = None if x.bias is None else x.bias[..., None]
    rows = [flat(t) for t in (x.entry_k, entry_v, bias)]
    return _run(_attend_entries, x, scale, *_integers(where), *rows)


def attend_chunks(
    x: Operands,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_chunks: Tensor,
    starts: Tensor,
    raw_start: Tensor,
    indices: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of queries with lists of chunks, a list for ``block`` neighbours."""
    n_blocks = (cu_seqlens_q.diff() + block - 1) // block
    within = torch.arange(raw_start.shape[1]) - _of_query(cu_seqlens_q[:-1], cu_seqlens_q)
    lists = _of_query(n_blocks.cumsum(0) - n_blocks, cu_seqlens_q) + within // block
    first, last = (_of_query(x, cu_seqlens_q) for x in (cu_chunks[:, :-1], cu_chunks[:, 1:]))
    own = _own_tokens(cu_seqlens_q, cu_seqlens_k)
    where = [own, first, last, starts, raw_start, lists, indices]
    return _run(_attend_chunks, x, scale, *_integers(where))


def _run(kernel, x: Operands, scale: float, *given) -> tuple[Tensor, Tensor]:
    S, H = x.q.shape[:2]
    kv_heads = x.k.shape[1]
    D_v = (x.k if x.v is None else x.v).shape[2]
    out = torch.from_numpy(np.empty((S, H, D_v), np.float32))
    lse = torch.empty(S, H)
    sink = sinks_of(x.sink, H)
    queries = flat(x.q), x.q.shape[2], np.float32(scale) * LOG2_E
    raw = flat(x.k), flat(x.k if x.v is None else x.v)
    run(kernel, S * kv_heads, kv_heads, queries, *given, *raw, sink, out.numpy(), lse.numpy())
    return out.to(x.q.dtype), lse


def _of_query(of_sequence: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Return for each query what its sequence has, in the last dimension."""
    return of_sequence.repeat_interleave(cu_seqlens_q.diff(), -1)


def _own_tokens(cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """Return the row of k of each query's own token: the queries are the last tokens."""
    return torch.arange(int(cu_q[-1])) + _of_query((cu_k - cu_q)[1:], cu_q)


def _integers(tensors: list[Tensor]) -> list[Array]:
    return [x.long().contiguous().numpy() for x in tensors]


@intrinsic
def _lowest_bit(typing_context, x):
    """Return the place of the lowest bit of an integer that is not zero."""

    def generate(context, b, signature, args):
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@jit
def _as_set(indices, n, bits, out):
    """Write the indices in 0 .. n - 1 in order, each once; return their number.

    ``bits`` are zeros for every number below n, and are zeros again.
    """
    for index in indices:
        if index >= 0 and index < n:
            bits[index >> 6] |= np.uint64(1) << np.uint64(index & 63)
    count = 0
    for place in range((n + 63) >> 6):
        word = bits[place]
        while word:
            out[count] = (place << 6) + np.int64(_lowest_bit(word))
            count += 1
            word &= word - np.uint64(1)
        bits[place] = 0
    return count


@jit
def _state(heads, D, D_v):
    """Return rows of queries, and of logits, maxima, sums and weighted sums."""
    M = (heads + 3) // 4 * 4
    queries, logits = np.zeros((1, M, D), np.float32), np.zeros((1, M, _TILE), np.float32)
    peaks, totals = np.empty(M, np.float32), np.empty(M, np.float32)
    return queries, logits, peaks, totals, np.empty((1, M, D_v), np.float32)


@fast
def _start(state, q, t, kv, heads, factor):
    """Take a query's heads."""
    queries, _, peaks, totals, weighted = state
    stored, steps = q
    for i in range(heads):
        at = t * steps[0] + (kv * heads + i) * steps[1]
        for d in range(queries.shape[2]):
            queries[0, i, d] = widen(stored[at + d]) * factor
    peaks[:] = -np.inf
    totals[:] = 0
    weighted[:] = 0


@fast
def _absorb(state, heads, k, v, at, n, bias):
    """Add ``n`` rows that start at ``at`` [2, TILE]: of keys, and of values."""
    queries, logits, peaks, totals, weighted = state
    at[:, n : (n + ROWS - 1) // ROWS * ROWS] = at[:, n - 1 : n]
    dots(queries, k, at[0], 0, n, (0, 1), logits)
    for i in range(heads):
        row = logits[0, i]
        for j in range(n):
            row[j] += bias[j]
        peaks[i], totals[i] = absorb_row(row, n, peaks[i], totals[i], weighted[0, i])
    add_weighted(logits, v, at[1], 0, n, (0, 1), weighted)


@jit
def _absorb_run(state, heads, k, v, kv, begin, end, at, no_bias):
    """Add the raw tokens ``begin .. end - 1``."""
    (k, k_steps), (v, v_steps) = k, v
    for first in range(begin, end, _TILE):
        n = min(_TILE, end - first)
        for j in range(n):
            at[0, j] = (first + j) * k_steps[0] + kv * k_steps[1]
            at[1, j] = (first + j) * v_steps[0] + kv * v_steps[1]
        _absorb(state, heads, k, v, at, n, no_bias)


@fast
def _finish(state, t, kv, heads, sink, out, lse):
    """Write a query's results; one that reads a value that is not finite gets NaN."""
    _, _, peaks, totals, weighted = state
    for i in range(heads):
        h = kv * heads + i
        one = slice(i, i + 1)
        lse[t, h] = merge(peaks[one], totals[one], weighted[0, one], sink[h], out[t, h])
        excess = np.float32(0)
        for d in range(out.shape[2]):
            excess += weighted[0, i, d] * np.float32(0)
        if excess != 0:
            out[t, h] = np.nan


@jit
def _attend_entries(first, last, kv_heads, query, own, first_entry, n_visible, raw_start, lists,
                    entry_k, entry_v, bias, k, v, sink, out, lse):  # fmt: skip
    q, D, factor = query
    heads, per_view = out.shape[1] // kv_heads, kv_heads // len(n_visible)
    state = _state(heads, D, out.shape[2])
    K, at = lists.shape[2], np.empty((2, _TILE), np.int64)
    most = n_visible.max() if n_visible.size else 0
    bits, listed = np.zeros((most >> 6) + 1, np.uint64), np.empty(K, np.int64)
    biases, no_bias = np.zeros(_TILE, np.float32), np.zeros(_TILE, np.float32)
    (keys, k_steps), (values, v_steps), (stored_bias, bias_steps) = entry_k, entry_v, bias
    for task in range(first, last):
        t, kv = task // kv_heads, task % kv_heads
        g, head = kv // per_view, kv % per_view
        _start(state, q, t, kv, heads, factor)
        mine = lists[t, 0 if lists.shape[1] == 1 else kv]
        count = _as_set(mine, n_visible[g, t], bits, listed)
        for begin in range(0, count, _TILE):
            n = min(_TILE, count - begin)
            for j in range(n):
                row = first_entry[g, t] + listed[begin + j]
                at[0, j] = row * k_steps[0] + head * k_steps[1]
                at[1, j] = row * v_steps[0] + head * v_steps[1]
                if stored_bias.size:
                    x = stored_bias[row * bias_steps[0] + head * bias_steps[1]]
                    biases[j] = widen(x) * LOG2_E
            _absorb(state, heads, keys, values, at, n, biases)
        _absorb_run(state, heads, k, v, kv, raw_start[g, t], own[t] + 1, at, no_bias)
        _finish(state, t, kv, heads, sink, out, lse)


@jit
def _attend_chunks(first, last, kv_heads, query, own, first_chunk, last_chunk, starts, raw_start,
                   list_of, lists, k, v, sink, out, lse):  # fmt: skip
    q, D, factor = query
    heads, per_view = out.shape[1] // kv_heads, kv_heads // len(raw_start)
    state = _state(heads, D, out.shape[2])
    at = np.empty((2, _TILE), np.int64)
    bits = np.zeros((starts.size >> 6) + 1, np.uint64)
    listed, no_bias = np.empty(lists.shape[2], np.int64), np.zeros(_TILE, np.float32)
    (keys, k_steps), (values, v_steps) = k, v
    for task in range(first, last):
        t, kv = task // kv_heads, task % kv_heads
        g = kv // per_view
        _start(state, q, t, kv, heads, factor)
        chunk, n_chunks = first_chunk[g, t], last_chunk[g, t] - first_chunk[g, t]
        mine = lists[list_of[t], 0 if lists.shape[1] == 1 else kv]
        count = _as_set(mine, n_chunks, bits, listed)
        before = min(raw_start[g, t], own[t] + 1)  # later tokens come with the recent ones
        n = 0
        for i in listed[:count]:
            end = starts[chunk + i + 1] if i + 1 < n_chunks else before
            for row in range(starts[chunk + i], min(end, before)):
                at[0, n] = row * k_steps[0] + kv * k_steps[1]
                at[1, n] = row * v_steps[0] + kv * v_steps[1]
                n += 1
                if n == _TILE:
                    _absorb(state, heads, keys, values, at, n, no_bias)
                    n = 0
        if n:
            _absorb(state, heads, keys, values, at, n, no_bias)
        _absorb_run(state, heads, k, v, kv, raw_start[g, t], own[t] + 1, at, no_bias)
        _finish(state, t, kv, heads, sink, out, lse)
