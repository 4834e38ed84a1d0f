"""Attention of many queries in numba: of those without lists, and the backward of all.

A block of neighbouring queries with the query heads of one KV head are the rows of a tile; what any
of them reads, entries and then raw tokens, comes in tiles of 64 rows, copied so that rows lie side
by side, and what a query does not read is masked. Tiles that no query of the block reads are not
touched; memory is linear in the number of tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dynchunk.ops._attention import Operands, check_rows
from dynchunk.ops.cpu import fast, jit
from dynchunk.ops.cpu._arrays import Array, flat, require_dtypes, sinks_of
from dynchunk.ops.cpu._numeric import LOG2_E, exp2
from dynchunk.ops.cpu._softmax import LN_2, absorb_row, base_of, merge
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu._tiles import add_weighted, dots, widen

_TILE = 64  # rows that are read at once, and rows of a block
_TASKS = 8  # at least, of a backward: parts of the queries that add up gradients of their own


def forward(
    x: Operands,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    require_dtypes(*x)
    check_rows(x, cu_seqlens_q, cu_seqlens_k, cu_entries)
    D_v = (x.k if x.v is None else x.v).shape[2]
    kv_heads, size = x.k.shape[1], _block_size(x, None)
    blocks = _blocks(cu_seqlens_q, size, 1)
    layout = _layout(cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start, None)
    out = torch.from_numpy(np.empty((*x.q.shape[:2], D_v), np.float32))
    lse = torch.empty(x.q.shape[:2])
    sink = sinks_of(x.sink, x.q.shape[1])
    run(
        _forward,
        len(blocks) * kv_heads,
        blocks,
        size,
        kv_heads,
        x.v is None,
        *layout[:-1],
        *_stored(x),
        x.k.shape[2],
        sink,
        np.float32(scale) * LOG2_E,
        out.numpy(),
        lse.numpy(),
    )
    return out.to(x.q.dtype), lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    x: Operands,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    indices: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of the operands, an empty tensor for each that is None."""
    require_dtypes(*x)
    D_v = (x.k if x.v is None else x.v).shape[2]
    kv_heads, size = x.k.shape[1], _block_size(x, indices)
    parts = -(-_TASKS // kv_heads)
    blocks = _blocks(cu_seqlens_q, size, parts)
    layout = _layout(cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start, indices)
    shift = (grad_lse - (grad_out.float() * out.float()).sum(-1)).contiguous()

    def zeros(of: Tensor) -> Array:
        return np.zeros((parts, *of.shape), np.float32)

    grad_q, grad_bias = np.zeros(x.q.shape, np.float32), zeros(x.entry_k[..., 0])
    grad_k, grad_entry_k = zeros(x.k), zeros(x.entry_k)
    grad_v = grad_k if x.v is None else zeros(x.v)
    grad_entry_v = grad_entry_k if x.entry_v is None else zeros(x.entry_v)
    run(
        _backward,
        parts * kv_heads,
        blocks,
        size,
        kv_heads,
        x.v is None,
        indices is not None,
        *layout,
        *_stored(x),
        x.k.shape[2],
        D_v,
        flat(grad_out),
        lse.contiguous().numpy(),
        shift.numpy(),
        np.float32(scale) * LOG2_E,
        grad_q,
        grad_k,
        grad_v,
        grad_entry_k,
        grad_entry_v,
        grad_bias,
    )
    of_sink = None
    if x.sink is not None:
        of_sink = ((x.sink.float() - lse).exp().where(lse != -torch.inf, 0) * shift).sum(0)
    of_k, of_v, of_entry_k, of_entry_v, of_bias = (
        torch.from_numpy(t).sum(0) for t in (grad_k, grad_v, grad_entry_k, grad_entry_v, grad_bias)
    )
    grads = Operands(torch.from_numpy(grad_q), of_k, of_v, of_entry_k, of_entry_v, of_bias, of_sink)
    return tuple(
        grad_out.new_empty(0) if t is None or grad is None else grad.to(t.dtype)
        for t, grad in zip(x, grads, strict=True)
    )


def _layout(
    cu_q: Tensor,
    cu_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    indices: Tensor | None,
) -> list[Array]:
    """Return the row of k of each query's own token, where what it reads lies, and its lists."""
    own = torch.arange(n_visible.shape[1]) + (cu_k - cu_q)[1:].repeat_interleave(cu_q.diff())
    lists = cu_q.new_empty(0, 0, 0) if indices is None else indices.sort(-1).values
    tensors = (own, cu_entries, n_visible, raw_start, lists)
    return [t.long().contiguous().numpy() for t in tensors]


def _block_size(x: Operands, indices: Tensor | None) -> int:
    """Return the queries of a block: one where each has a list of its own."""
    return 1 if indices is not None else max(1, _TILE * x.k.shape[1] // x.q.shape[1])


def _blocks(cu_seqlens_q: Tensor, size: int, parts: int) -> Array:
    """Return (sequence, first query, one past its last, part of the sequence), int64 [n, 4]."""
    cu = cu_seqlens_q.long().numpy()
    counts = -(-np.diff(cu) // size)
    sequence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = cu[sequence] + within * size
    last = np.minimum(first + size, cu[sequence + 1])
    return np.stack([sequence, first, last, within * parts // counts[sequence]], 1)


def _stored(x: Operands) -> list[tuple[Array, tuple[int, ...]]]:
    entry_v = x.entry_k if x.entry_v is None else x.entry_v
    bias = None if x.bias is None else x.bias[..., None]
    return [flat(t) for t in (x.q, x.k, x.k if x.v is None else x.v, x.entry_k, entry_v, bias)]


@fast
def _copy(source, start, row):
    stored = source[start : start + row.size]
    for d in range(row.size):
        row[d] = widen(stored[d])


@fast
def _copy_finite(source, start, row):
    """Copy stored numbers to ``row``, zeros for what is not finite; return whether all were."""
    _copy(source, start, row)
    excess = np.float32(0)
    for d in range(row.size):
        excess += row[d] * np.float32(0)  # NaN unless it is finite
    if excess == 0:
        return True
    for d in range(row.size):
        row[d] = row[d] if row[d] * np.float32(0) == 0 else np.float32(0)
    return False


@jit
def _load_queries(source, steps, first, last, kv, heads, clean, out):
    """Copy ``heads`` heads of a block's queries, if ``clean`` zeros for what is not finite.

    Zero the rest.
    """
    i = 0
    for t in range(first, last):
        for h in range(kv * heads, (kv + 1) * heads):
            at = t * steps[0] + h * steps[1]
            if clean:
                _copy_finite(source, at, out[0, i])
            else:
                _copy(source, at, out[0, i])
            i += 1
    out[0, i:] = 0


@jit
def _load_tile(k, v, same, head, first, listed, begin, n, clean, keys, values, is_bad):
    """Copy ``n`` rows of a head: ``first`` plus a number from ``begin`` on, or plus those listed.

    Values that are not finite become zero and are marked; keys too if ``clean`` or if they are the
    values. Return whether there is a mark.
    """
    (k, k_steps), (v, v_steps) = k, v
    any_bad = False
    for j in range(n):
        row = first + (listed[begin + j] if listed.size else begin + j)
        at = row * k_steps[0] + head * k_steps[1]
        if clean or same:
            is_bad[j] = not _copy_finite(k, at, keys[j])
        else:
            _copy(k, at, keys[j])
        if not same:
            is_bad[j] = not _copy_finite(v, row * v_steps[0] + head * v_steps[1], values[j])
        any_bad |= is_bad[j]
    keys[n:] = 0
    values[n:] = 0
    return any_bad


@jit
def _load_bias(bias, head, first, listed, begin, n, out):
    array, steps = bias
    if array.size == 0:
        out[:] = 0
        return
    for j in range(n):
        row = first + (listed[begin + j] if listed.size else begin + j)
        out[j] = widen(array[row * steps[0] + head * steps[1]]) * LOG2_E


@fast
def _absorb(queries, n_rows, keys, values, at, begin, n, lo, hi, bias, is_bad, any_bad, state):
    """Add a tile of ``n`` rows, of which row i of the block reads ``lo[i] - begin ..``."""
    logits, peaks, totals, weighted, is_nan = state
    dots(queries, keys, at[0], 0, n, (0, 1), logits)
    for i in range(n_rows):
        row = logits[0, i]
        low, high = max(lo[i] - begin, 0), min(hi[i] - begin, n)
        if low >= high:
            row[:] = 0
            continue
        for j in range(n):
            row[j] += bias[j]
        row[:low] = -np.inf
        row[high:n] = -np.inf
        if any_bad and is_bad[low:high].any():
            is_nan[i] = True
        peaks[i], totals[i] = absorb_row(row, n, peaks[i], totals[i], weighted[0, i])
    logits[0, n_rows:] = 0
    add_weighted(logits, values, at[1], 0, n, (0, 1), weighted)


@fast
def _forward(
    first,
    last,
    blocks,
    size,
    kv_heads,
    same,
    own,
    cu_entries,
    n_visible,
    raw_start,
    q,
    k,
    v,
    entry_k,
    entry_v,
    bias,
    D,
    sink,
    factor,
    out,
    lse,
):
    heads, per_view, D_v = out.shape[1] // kv_heads, kv_heads // len(cu_entries), out.shape[2]
    M = (size * heads + 3) // 4 * 4
    queries = np.empty((1, M, D), np.float32)
    flat_keys, flat_values = np.empty(_TILE * D, np.float32), np.empty(_TILE * D_v, np.float32)
    if same:
        flat_values = flat_keys
    keys, values = flat_keys.reshape(_TILE, D), flat_values.reshape(_TILE, D_v)
    at = np.arange(_TILE) * D, np.arange(_TILE) * D_v
    peaks, totals = np.empty(M, np.float32), np.empty(M, np.float32)
    weighted, logits = np.empty((1, M, D_v), np.float32), np.empty((1, M, _TILE), np.float32)
    is_nan, is_bad = np.empty(M, np.bool_), np.empty(_TILE, np.bool_)
    lo, hi, tile_bias = np.empty(M, np.int64), np.empty(M, np.int64), np.empty(_TILE, np.float32)
    state = logits, peaks, totals, weighted, is_nan
    nothing = np.empty(0, np.int64)
    for task in range(first, last):
        b, begin_t, end_t = (
            blocks[task // kv_heads, 0],
            blocks[task // kv_heads, 1],
            blocks[task // kv_heads, 2],
        )
        kv = task % kv_heads
        g, head = kv // per_view, kv % per_view
        n_rows = (end_t - begin_t) * heads
        _load_queries(q[0], q[1], begin_t, end_t, kv, heads, False, queries)
        queries *= factor
        peaks[:] = -np.inf
        totals[:] = 0
        weighted[:] = 0
        is_nan[:] = False
        count = _entries_read(begin_t, end_t, heads, n_visible[g], lo, hi)
        for begin in range(0, count, _TILE):
            n = min(_TILE, count - begin)
            any_bad = _load_tile(
                entry_k,
                entry_v,
                same,
                head,
                cu_entries[g, b],
                nothing,
                begin,
                n,
                False,
                keys,
                values,
                is_bad,
            )
            _load_bias(bias, head, cu_entries[g, b], nothing, begin, n, tile_bias)
            _absorb(
                queries,
                n_rows,
                flat_keys,
                flat_values,
                at,
                begin,
                n,
                lo,
                hi,
                tile_bias,
                is_bad,
                any_bad,
                state,
            )
        start, stop = _tokens_read(begin_t, end_t, heads, raw_start[g], own, lo, hi)
        tile_bias[:] = 0
        for begin in range(start, stop, _TILE):
            n = min(_TILE, stop - begin)
            any_bad = _load_tile(k, v, same, kv, 0, nothing, begin, n, False, keys, values, is_bad)
            _absorb(
                queries,
                n_rows,
                flat_keys,
                flat_values,
                at,
                begin,
                n,
                lo,
                hi,
                tile_bias,
                is_bad,
                any_bad,
                state,
            )
        for i in range(n_rows):
            t, h = begin_t + i // heads, kv * heads + i % heads
            lse[t, h] = merge(
                peaks[i : i + 1], totals[i : i + 1], weighted[0, i : i + 1], sink[h], out[t, h]
            )
            if is_nan[i]:
                out[t, h] = np.nan
                if same:
                    lse[t, h] = np.nan


@jit
def _entries_read(begin_t, end_t, heads, n_visible, lo, hi):
    """Set the bounds of each row of a block; return how many entries it reads."""
    lo[:] = 0
    count = 0
    for t in range(begin_t, end_t):
        hi[(t - begin_t) * heads : (t - begin_t + 1) * heads] = n_visible[t]
        count = max(count, n_visible[t])
    return count


@jit
def _entries_listed(indices, n_visible, lo, hi, listed):
    """Write the visible entries of a query's list, which is in order; set the bounds of its rows.

    Return their number.
    """
    count = 0
    for index in indices:
        is_new = count == 0 or index != listed[count - 1]
        if is_new and index >= 0 and index < n_visible:
            listed[count] = index
            count += 1
    lo[:] = 0
    hi[:] = count
    return count


@jit
def _tokens_read(begin_t, end_t, heads, raw_start, own, lo, hi):
    """Set the bounds of each row of a block; return the first token it reads and the end."""
    start, stop = raw_start[begin_t], own[begin_t] + 1
    for t in range(begin_t, end_t):
        lo[(t - begin_t) * heads : (t - begin_t + 1) * heads] = raw_start[t]
        hi[(t - begin_t) * heads : (t - begin_t + 1) * heads] = own[t] + 1
        start, stop = min(start, raw_start[t]), max(stop, own[t] + 1)
    return start, stop


@fast
def _backward(
    first,
    last,
    blocks,
    size,
    kv_heads,
    same,
    has_lists,
    own,
    cu_entries,
    n_visible,
    raw_start,
    lists,
    q,
    k,
    v,
    entry_k,
    entry_v,
    bias,
    D,
    D_v,
    grad_out,
    lse,
    shift,
    factor,
    grad_q,
    grad_k,
    grad_v,
    grad_entry_k,
    grad_entry_v,
    grad_bias,
):
    heads, per_view = lse.shape[1] // kv_heads, kv_heads // len(cu_entries)
    M = (size * heads + 7) // 8 * 8
    flat_queries, flat_grads = np.empty(M * D, np.float32), np.empty(M * D_v, np.float32)
    queries, grads = flat_queries.reshape(1, M, D), flat_grads.reshape(1, M, D_v)
    flat_keys, flat_values = np.empty(_TILE * D, np.float32), np.empty(_TILE * D_v, np.float32)
    if same:
        flat_values = flat_keys
    keys, values = flat_keys.reshape(_TILE, D), flat_values.reshape(_TILE, D_v)
    rows_at = np.arange(max(M, _TILE))
    at = rows_at * D, rows_at * D_v
    weights, of_logits = np.empty((1, M, _TILE), np.float32), np.empty((1, M, _TILE), np.float32)
    weights_t, of_logits_t = (
        np.empty((1, _TILE, M), np.float32),
        np.empty((1, _TILE, M), np.float32),
    )
    of_queries = np.empty((1, M, D), np.float32)
    of_keys, of_values = np.empty((1, _TILE, D), np.float32), np.empty((1, _TILE, D_v), np.float32)
    of_rows = np.empty((2, M), np.float32)
    lo, hi, tile_bias = np.empty(M, np.int64), np.empty(M, np.int64), np.empty(_TILE, np.float32)
    is_bad = np.empty(_TILE, np.bool_)
    listed, nothing = np.empty(lists.shape[2], np.int64), np.empty(0, np.int64)
    work = weights, of_logits, weights_t, of_logits_t, of_queries, of_keys, of_values
    rows_of = queries, grads, flat_queries, flat_grads, of_rows
    for task in range(first, last):
        part, kv = task // kv_heads, task % kv_heads
        g, head = kv // per_view, kv % per_view
        for block in range(len(blocks)):
            if blocks[block, 3] != part:
                continue
            b, begin_t, end_t = blocks[block, 0], blocks[block, 1], blocks[block, 2]
            n_rows = (end_t - begin_t) * heads
            _load_queries(q[0], q[1], begin_t, end_t, kv, heads, True, queries)
            queries *= factor
            _load_queries(grad_out[0], grad_out[1], begin_t, end_t, kv, heads, True, grads)
            for i in range(n_rows):
                t, h = begin_t + i // heads, kv * heads + i % heads
                of_rows[0, i] = base_of(lse[t, h]) * LOG2_E
                of_rows[1, i] = shift[t, h]
            of_queries[:] = 0
            if has_lists:  # then a block is a query
                mine = lists[begin_t, 0 if lists.shape[1] == 1 else kv]
                count = _entries_listed(mine, n_visible[g, begin_t], lo, hi, listed)
                rows = listed[:count]
            else:
                count = _entries_read(begin_t, end_t, heads, n_visible[g], lo, hi)
                rows = nothing
            for begin in range(0, count, _TILE):
                n = min(_TILE, count - begin)
                _load_tile(
                    entry_k,
                    entry_v,
                    same,
                    head,
                    cu_entries[g, b],
                    rows,
                    begin,
                    n,
                    True,
                    keys,
                    values,
                    is_bad,
                )
                _load_bias(bias, head, cu_entries[g, b], rows, begin, n, tile_bias)
                _tile_backward(
                    rows_of, n_rows, flat_keys, flat_values, at, begin, n, lo, hi, tile_bias, work
                )
                _scatter(
                    of_keys,
                    of_values,
                    of_logits,
                    n_rows,
                    part,
                    head,
                    cu_entries[g, b],
                    rows,
                    begin,
                    n,
                    grad_entry_k,
                    grad_entry_v,
                    grad_bias,
                )
            start, stop = _tokens_read(begin_t, end_t, heads, raw_start[g], own, lo, hi)
            tile_bias[:] = 0
            for begin in range(start, stop, _TILE):
                n = min(_TILE, stop - begin)
                _load_tile(k, v, same, kv, 0, nothing, begin, n, True, keys, values, is_bad)
                _tile_backward(
                    rows_of, n_rows, flat_keys, flat_values, at, begin, n, lo, hi, tile_bias, work
                )
                _scatter(
                    of_keys,
                    of_values,
                    of_logits,
                    n_rows,
                    part,
                    kv,
                    0,
                    nothing,
                    begin,
                    n,
                    grad_k,
                    grad_v,
                    grad_bias[:, :0],
                )
            for i in range(n_rows):
                t, h = begin_t + i // heads, kv * heads + i % heads
                for d in range(D):
                    grad_q[t, h, d] = of_queries[0, i, d] * (factor * LN_2)


@fast
def _tile_backward(rows_of, n_rows, keys, values, at, begin, n, lo, hi, bias, work):
    """Add a tile's part to the gradient of queries; set those of its logits, keys and values."""
    queries, grads, flat_queries, flat_grads, of_rows = rows_of
    weights, of_logits, weights_t, of_logits_t, of_queries, of_keys, of_values = work
    M = queries.shape[1]
    dots(queries, keys, at[0], 0, n, (0, 1), weights)
    dots(grads, values, at[1], 0, n, (0, 1), of_logits)
    for i in range(M):
        row, of_row = weights[0, i], of_logits[0, i]
        low, high = 0, 0
        if i < n_rows:
            low, high = max(lo[i] - begin, 0), max(min(hi[i] - begin, n), 0)
        row[: min(low, n)] = 0
        of_row[: min(low, n)] = 0
        for j in range(low, high):
            row[j] = exp2(row[j] + bias[j] - of_rows[0, i])
            of_row[j] = row[j] * (of_row[j] + of_rows[1, i])
        row[max(low, high) :] = 0
        of_row[max(low, high) :] = 0
    for j in range(_TILE):
        for i in range(M):
            weights_t[0, j, i] = weights[0, i, j]
            of_logits_t[0, j, i] = of_logits[0, i, j]
    add_weighted(of_logits, keys, at[0], 0, n, (0, 1), of_queries)
    of_keys[:] = 0
    of_values[:] = 0
    add_weighted(of_logits_t, flat_queries, at[0], 0, M, (0, 1), of_keys)
    add_weighted(weights_t, flat_grads, at[1], 0, M, (0, 1), of_values)


@fast
def _scatter(
    of_keys,
    of_values,
    of_logits,
    n_rows,
    part,
    head,
    first,
    listed,
    begin,
    n,
    grad_k,
    grad_v,
    grad_bias,
):
    for j in range(n):
        row = first + (listed[begin + j] if listed.size else begin + j)
        for d in range(of_keys.shape[2]):
            grad_k[part, row, head, d] += of_keys[0, j, d] * LN_2
        for d in range(of_values.shape[2]):
            grad_v[part, row, head, d] += of_values[0, j, d]
        if grad_bias.shape[1]:
            for i in range(n_rows):
                grad_bias[part, row, head] += of_logits[0, i, j]
