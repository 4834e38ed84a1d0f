"""Attention over a paged cache in numba.

The rows that a query reads, entries and then raw ones, are split into parts of equal size; several
threads read parts, in tiles, and the parts are put together in their order. Each row is read once,
as it lies in memory, for all heads. Nothing is allocated that grows with the context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dynchunk.ops.cpu import fast, jit
from dynchunk.ops.cpu._arrays import Array, flat, require_dtypes, sinks_of
from dynchunk.ops.cpu._numeric import LOG2_E
from dynchunk.ops.cpu._softmax import absorb_row, merge
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu._tiles import add_weighted_ahead, dots_ahead, widen

_TILE = 64  # rows whose logits are there at once
PARTS = 32  #: at most, whatever the context
_SHORTEST = 128  # rows of a part


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    raw_begin: Tensor,
    raw_end: Tensor,
    indices: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    require_dtypes(q, k, v, entry_k, entry_v, bias, sink)
    v, entry_v = (k, entry_k) if v is None or entry_v is None else (v, entry_v)
    queries = _grouped(q, k.shape[1], len(pages), scale)
    at = [x.contiguous().numpy() for x in (pages, sequence, n_visible, raw_begin, raw_end)]
    check_places(*at, len(k), entry_k.shape[1])
    lists, counts = _sets(indices, n_visible)
    biases = None if bias is None else bias[..., None]
    stored = [flat(x) for x in (k, v, entry_k, entry_v, biases)]
    # Of the rows of each query, view and part: [S, G, parts, H_kv / G, M (, D_v)].
    shape = (*queries.shape[:2], PARTS, *queries.shape[2:4])
    parts = [np.empty(size, np.float32) for size in (shape, shape, (*shape, v.shape[2]))]
    run(_read, counts.size * PARTS, queries, *at, lists, counts, len(entry_k), entry_k.shape[1],
        *stored, *parts)  # fmt: skip
    out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    lse = np.empty(q.shape[:2], np.float32)
    _combine(*parts, sinks_of(sink, q.shape[1]), out, lse)
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse)


def _grouped(q: Tensor, kv_heads: int, views: int, scale: float) -> Array:
    """Return q as float32 [S, G, H_kv / G, M, D], M even, scaled so that weights are 2^logit."""
    S, H, D = q.shape
    rows = H // kv_heads
    grouped = np.zeros((S, views, kv_heads // views, rows + rows % 2, D), np.float32)
    given = flat(q.float().contiguous())[0].reshape(*grouped.shape[:3], rows, D)
    np.multiply(given, np.float32(scale) * LOG2_E, out=grouped[:, :, :, :rows])
    return grouped


def _sets(indices: Tensor | None, n_visible: Tensor) -> tuple[Array, Array]:
    """Return the visible indices in order, each once, [S, L, K], and their counts [S, G, L / G].

    L is 1 or H_kv. Without indices: no lists, and the counts of all visible entries.
    """
    of_view = n_visible.T.long().contiguous().numpy()
    if indices is None:
        return np.empty((0, 0, 0), np.int64), of_view[..., None]
    lists = indices.long().sort(-1).values.numpy()
    per_view = max(lists.shape[1] // of_view.shape[1], 1)
    counts = np.empty((*of_view.shape, per_view), np.int64)
    _drop_repeated(lists, of_view, counts)
    return lists, counts


@jit
def _drop_repeated(lists, of_view, counts):
    S, G, per_view = counts.shape
    for s in range(S):
        for i in range(lists.shape[1]):
            row = lists[s, i]
            n = 0
            for index in row:
                if index >= 0 and (n == 0 or index != row[n - 1]):
                    row[n] = index
                    n += 1
            for g in range(G):
                if lists.shape[1] == 1 or g == i // per_view:
                    counts[s, g, i % per_view] = np.searchsorted(row[:n], of_view[s, g])


@jit
def check_places(pages, sequence, n_visible, raw_begin, raw_end, n_rows, page_size):
    """Raise where a query would read what is not there."""
    G, B, slots = pages.shape
    for s in range(sequence.size):
        if sequence[s] < 0 or sequence[s] >= B:
            raise IndexError("sequence: expected one of those that have pages")
        for g in range(G):
            if n_visible[g, s] > slots * page_size:
                raise IndexError("n_visible: expected no more entries than the pages hold")
            if raw_begin[g, s] < raw_end[s] and (raw_begin[g, s] < 0 or raw_end[s] > n_rows):
                raise IndexError("raw_begin, raw_end: expected rows of k")


@fast
def _read(first, last, queries, pages, sequence, n_visible, raw_begin, raw_end, lists, counts,
          n_pages, page_size, stored_k, stored_v, stored_entry_k, stored_entry_v, stored_bias,
          peaks, totals, weighted):  # fmt: skip
    """Read parts of what queries see; a part without rows has a total of -1."""
    k, (k_row, k_head) = stored_k
    v, (v_row, v_head) = stored_v
    entry_k, k_steps = stored_entry_k
    entry_v, v_steps = stored_entry_v
    bias, bias_steps = stored_bias
    steps = k_steps[:2], v_steps[:2], bias_steps[:2]
    G, per_view, M = queries.shape[1:4]
    list_heads = counts.shape[2]
    logits = np.empty((per_view, M, _TILE), np.float32)
    none = np.empty(0, np.int64)
    at = np.zeros((3, 2 * _TILE), np.int64)  # of keys, values and biases; of a tile and the next
    for task in range(first, last):
        part, rest = task % PARTS, task // PARTS
        own, rest = rest % list_heads, rest // list_heads
        g, s = rest % G, rest // G
        heads = (0, per_view) if list_heads == 1 else (own, own + 1)
        state = peaks[s, g, part], totals[s, g, part], weighted[s, g, part]
        n_entries, n_raw = counts[s, g, own], max(raw_end[s] - raw_begin[g, s], 0)
        begin, end = part_of(part, n_entries + n_raw)
        for head in range(heads[0], heads[1]):
            state[0][head] = -np.inf
            state[1][head] = 0 if begin < end else -1
            state[2][head] = 0
        listed = lists[s, 0 if lists.shape[1] == 1 else g * per_view + own] if lists.size else none
        for row in range(begin, min(end, n_entries), _TILE):
            for tile in range(0 if row == begin else 1, 2):
                where = pages[g, sequence[s]], listed, row + tile * _TILE, min(end, n_entries)
                _place_entries(*where, n_pages, page_size, steps, at[:, tile * _TILE :])
            n = min(_TILE, min(end, n_entries) - row)
            _absorb(queries[s, g], entry_k, k_steps[2], entry_v, v_steps[2], bias, bias_steps[2],
                    at, n, heads, logits, state)  # fmt: skip
            at[:, :_TILE] = at[:, _TILE:]
        shift = raw_begin[g, s] - n_entries
        for row in range(max(begin, n_entries), end, _TILE):
            for tile in range(2):
                for j in range(_TILE):
                    i = shift + min(row + tile * _TILE + j, end - 1)
                    at[0, tile * _TILE + j] = i * k_row + g * per_view * k_head
                    at[1, tile * _TILE + j] = i * v_row + g * per_view * v_head
            n = min(_TILE, end - row)
            _absorb(queries[s, g], k, k_head, v, v_head, bias[:0], 0,
                    at, n, heads, logits, state)  # fmt: skip


@jit
def _place_entries(pages, listed, first, end, n_pages, page_size, steps, at):
    """Write where a tile of entries lies, those listed if there is a list; the last one repeats."""
    first = min(first, end - 1)
    slot, row = first // page_size, first % page_size
    for j in range(_TILE):
        if listed.size:
            i = listed[min(first + j, end - 1)]
            slot, row = i // page_size, i % page_size
        elif 0 < j < end - first:
            row += 1
            if row == page_size:
                slot, row = slot + 1, 0
        page = pages[slot]
        if page < 0 or page >= n_pages:
            raise IndexError("pages: expected pages of entry_k for all visible entries")
        for kind in range(3):
            at[kind, j] = page * steps[kind][0] + row * steps[kind][1]


@jit
def part_of(part, n_rows):
    """Return the first row of a part and one past its last: the same parts for so many rows."""
    size = max(_SHORTEST, (n_rows + PARTS - 1) // PARTS)
    size = (size + _TILE - 1) // _TILE * _TILE
    return min(part * size, n_rows), min((part + 1) * size, n_rows)


@fast
def _absorb(q, k, k_head, v, v_head, bias, bias_head, at, n, heads, logits, state):
    """Add a tile of ``n`` rows to the state of a view's heads.

    Its values, and then the next tile's keys, are on their way while others are in use.
    """
    peaks, totals, weighted = state
    k_at, v_at, bias_at = at[0], at[1], at[2]
    dots_ahead(q, k, k_at, k_head, n, heads, logits, v, v_at, v_head)
    for head in range(heads[0], heads[1]):
        for i in range(q.shape[1]):
            row = logits[head, i]
            if bias.size:
                for j in range(n):
                    row[j] += widen(bias[bias_at[j] + head * bias_head]) * LOG2_E
            peaks[head, i], totals[head, i] = absorb_row(
                row, n, peaks[head, i], totals[head, i], weighted[head, i]
            )
    add_weighted_ahead(logits, v, v_at, v_head, n, heads, weighted, k, k_at[_TILE:], k_head)


@fast
def _combine(peaks, totals, weighted, sinks, out, lse):
    G, per_view = peaks.shape[1], peaks.shape[3]
    rows = out.shape[1] // (G * per_view)  # without padding
    for s in range(out.shape[0]):
        for h in range(out.shape[1]):
            g, head, i = h // rows // per_view, h // rows % per_view, h % rows
            lse[s, h] = merge(
                peaks[s, g, :, head, i],
                totals[s, g, :, head, i],
                weighted[s, g, :, head, i],
                sinks[h],
                out[s, h],
            )
