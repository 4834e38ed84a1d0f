"""Index scores and exact top-k in numba.

Scores come in tiles of 64 entries and are never all there at once: each query keeps a buffer of
candidates, which is cut back to the best when it is full. A score and an index make one integer,
greater for a better entry, so that there are no ties; what is left is sorted by numpy, which has
vector instructions for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops.cpu import jit
from dynchunk.ops.cpu._arrays import Array, flat, require_dtypes
from dynchunk.ops.cpu._scores import TILE, load_keys, score_tile
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu._tiles import widen

_ROWS = 256  # of a block of queries, a row for each head
_CHUNK = 256  # queries whose chosen keys a backward has at once
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices), both [S, topk]."""
    require_dtypes(q, k, weights)
    expected = f"{int(cu_entries.max())} rows, as laid out"
    require(len(k) == int(cu_entries.max()), "k", expected, len(k))
    scores = torch.from_numpy(np.full((len(q), topk), -np.inf, np.float32))
    indices = torch.from_numpy(np.full((len(q), topk), -1, np.int64))
    first = cu_entries[0, :-1].repeat_interleave(cu_seqlens_q.diff())
    layout = [x.long().contiguous().numpy() for x in (first, n_visible[0])]
    kept = min(topk, max(int(n_visible.max()), 0)) if len(q) else 0
    size = max(1, _ROWS // max(q.shape[1], 1))
    run(
        _index_topk,
        -(-len(q) // size),
        size,
        *layout,
        flat(q),
        flat(k),
        flat(weights),
        *q.shape[1:],
        kept,
        np.float32(scale),
        scores.numpy(),
        indices.numpy(),
    )
    return scores, indices


def index_topk_backward(
    grad_scores: Tensor,
    grad_indices: Tensor,
    scores: Tensor,
    indices: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and weights: torch's matmuls over the chosen keys only.

    Unlike the forward, their last bits may depend on other queries and on the number of threads.
    """
    grad_q, grad_k, grad_weights = (torch.zeros(x.shape) for x in (q, k, weights))
    first = cu_entries[0, :-1].repeat_interleave(cu_seqlens_q.diff())[:, None]
    for start in range(0, len(q) if topk else 0, _CHUNK):
        part = slice(start, start + _CHUNK)
        is_chosen = indices[part] >= 0
        rows = (indices[part] + first[part]).where(is_chosen, 0)
        if len(k) == 0:
            break
        keys = k[rows].float().where(is_chosen[..., None], 0)
        of_q = q[part].float()
        dots = torch.einsum("thd,tkd->thk", of_q, keys)
        grad = (grad_scores[part] * scale).where(is_chosen, 0)
        of_dots = grad[:, None] * weights[part].float()[..., None] * (dots > 0)
        grad_q[part] = torch.einsum("thk,tkd->thd", of_dots, keys)
        of_keys = torch.einsum("thk,thd->tkd", of_dots, of_q)
        grad_k.index_add_(0, rows.flatten(), of_keys.flatten(0, 1))
        grad_weights[part] = torch.einsum("thk,tk->th", dots.relu(), grad)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_weights.to(weights.dtype)


def _index_topk(
    begin: int,
    end: int,
    size: int,
    first: Array,
    n_visible: Array,
    q: Any,
    k: Any,
    weights: Any,
    heads: int,
    D: int,
    kept: int,
    factor: float,
    scores: Array,
    indices: Array,
) -> None:
    """Find the best of blocks of queries."""
    rows = slice(begin * size, min(end * size, len(n_visible)))
    best = np.empty((rows.stop - rows.start, kept), np.uint64)
    _find(begin, end, size, first, n_visible, q, k, weights, heads, D, factor, best)
    write_best(best, scores[rows], indices[rows])


@jit
def load_queries(q, weights, heads, first, last, out, out_weights):
    """Copy the heads of queries, one after another, and their weights."""
    (q, q_steps), (weights, w_steps) = q, weights
    for t in range(first, last):
        for h in range(heads):
            row, at = out[(t - first) * heads + h], t * q_steps[0] + h * q_steps[1]
            for d in range(row.size):
                row[d] = widen(q[at + d])
            out_weights[(t - first) * heads + h] = widen(weights[t * w_steps[0] + h])


@jit
def _score(order):
    """Return the score of a key's upper half."""
    flipped = 0xFFFFFFFF - (order >> 31) * 0x7FFFFFFF  # only the sign, or all bits
    return np.uint32(order ^ flipped).view(np.float32)


@jit
def push(scores, n, first, kept, survivors, keys, count, lowest):
    """Add the entries ``first ..`` of a tile to the candidates; return (their number, lowest).

    Keys up to ``lowest`` are not among the best. There is room for a tile beyond ``2 * kept``.
    Which entries survive cannot be predicted: nothing branches on it.
    """
    floor = _score(np.uint32(lowest >> np.uint64(32)))  # NaN at first: nothing is below
    found = 0
    for j in range(n):
        survivors[found] = j
        found += not (scores[j] < floor)
    for j in survivors[:found]:
        key = _key(scores[j], first + j)
        keys[count] = key
        count += key > lowest
    if count >= 2 * kept:
        keep_best(keys[:count], kept)
        count = min(count, kept)
        lowest = keys[:count].min() if count else lowest
    return count, lowest


@jit
def _key(score, index):
    """Order by score, NaN first, then by index, the lowest first."""
    bits = np.uint32(np.float32(score if score != 0 else np.float32(0)).view(np.uint32))  # -0 is 0
    order = np.uint32(bits ^ (((bits >> 31) * 0x7FFFFFFF) | 0x80000000))  # the sign, or all bits
    order = order if score == score else np.uint32(0xFFFFFFFF)
    return (np.uint64(order) << np.uint64(32)) | np.uint64(0xFFFFFFFF - index)


@jit
def keep_best(keys, kept):
    """Move the ``kept`` greatest of keys, no two alike, to the front, in any order (quickselect).

    Each step swaps, needed or not, since a branch would be mispredicted half of the time.
    """
    low, high = 0, keys.size
    while low < kept < high:
        middle = (low + high) // 2
        pivot = max(min(keys[low], keys[middle]), min(max(keys[low], keys[middle]), keys[high - 1]))
        for at in (low, middle, high - 1):
            if keys[at] == pivot:
                keys[at], keys[low] = keys[low], keys[at]
                break
        greater = low + 1  # from there on, keys are less than the pivot
        for i in range(low + 1, high):
            key = keys[i]
            keys[i] = keys[greater]
            keys[greater] = key
            greater += key > pivot
        keys[low], keys[greater - 1] = keys[greater - 1], pivot
        if kept < greater:
            high = greater - 1
        else:
            low = greater


@jit
def take_best(keys, out):
    """Write the best of the candidates, as many as there is room for, in any order.

    As their complements, the lowest of which is the best; the greatest number stands for none.
    """
    keep_best(keys, out.size)
    for i in range(out.size):
        out[i] = ~keys[i] if i < keys.size else _NONE


def write_best(best: Array, scores: Array, indices: Array) -> None:
    """Put what :func:`take_best` wrote in order, row by row; what is there is left for none."""
    best.sort(axis=1)
    _write(best, scores, indices)


@jit
def _write(best, scores, indices):
    for t in range(len(best)):
        for rank in range(best.shape[1]):
            if best[t, rank] == _NONE:
                break
            key = ~best[t, rank]
            scores[t, rank] = _score(np.uint32(key >> np.uint64(32)))
            indices[t, rank] = np.int64(0xFFFFFFFF) - np.int64(key & np.uint64(0xFFFFFFFF))


@jit
def _find(begin, end, size, first, n_visible, q, k, weights, heads, D, factor, best):
    stored, (step,) = k
    kept = best.shape[1]
    queries = np.empty((size * heads, D), np.float32)
    of_head = np.empty(size * heads, np.float32)
    keys, tile = np.empty((D, TILE), np.float32), np.empty((size, TILE), np.float32)
    candidates = np.empty((size, 2 * kept + TILE), np.uint64)
    counts, lowest = np.empty(size, np.int64), np.empty(size, np.uint64)
    at, places = np.zeros(TILE, np.int64), np.empty(TILE + 1, np.int64)
    for block in range(begin, end):
        start, stop = block * size, min((block + 1) * size, len(n_visible))
        counts[:] = 0
        lowest[:] = 0
        t = start
        while t < stop:  # queries of one sequence
            last = t
            seen = 0
            while last < stop and first[last] == first[t]:
                seen = max(seen, n_visible[last])
                last += 1
            load_queries(q, weights, heads, t, last, queries, of_head)
            for i in range(0, seen if kept else 0, TILE):
                n = min(TILE, seen - i)
                for j in range(n):
                    at[j] = (first[t] + i + j) * step
                load_keys(stored, at, n, keys)
                score_tile(queries, of_head, heads, last - t, keys, factor, tile)
                for row in range(last - t):
                    own = t - start + row
                    visible = min(n, n_visible[start + own] - i)
                    counts[own], lowest[own] = push(
                        tile[row],
                        visible,
                        i,
                        kept,
                        places,
                        candidates[own],
                        counts[own],
                        lowest[own],
                    )
            t = last
        for own in range(stop - start):
            take_best(candidates[own, : counts[own]], best[start + own - begin * size])
