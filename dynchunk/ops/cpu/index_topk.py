"""Index scores and exact top-k in numba.

Scores come in tiles of 64 entries and are never all there at once: each query keeps a buffer of
candidates, which is cut back to the best when it is full. A score and an index make one integer,
greater for a better entry, so that there are no ties.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops.cpu import fast, jit
from dynchunk.ops.cpu._arrays import flat, require_dtypes
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu._tiles import dots, widen

TILE = 64  # entries
_ROWS = 64  # of a block of queries, a row for each head
_CHUNK = 256  # queries whose chosen keys a backward has at once


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


@jit
def load_queries(q, weights, heads, first, last, out, out_weights):
    """Copy the heads of queries as rows of a tile, and their weights."""
    (q, q_steps), (weights, w_steps) = q, weights
    out[:] = 0
    for t in range(first, last):
        for h in range(heads):
            row, at = out[0, (t - first) * heads + h], t * q_steps[0] + h * q_steps[1]
            for d in range(row.size):
                row[d] = widen(q[at + d])
            out_weights[t - first, h] = widen(weights[t * w_steps[0] + h])


@fast
def score_tile(queries, weights, count, k, at, n, factor, products, scores):
    """Write the scores of ``count`` queries and a tile of entries to ``scores`` [.., TILE]."""
    heads = weights.shape[1]
    dots(queries, k, at, 0, n, (0, 1), products)
    for t in range(count):
        row = scores[t]
        row[:] = 0
        for h in range(heads):
            weight, product = weights[t, h], products[0, t * heads + h]
            for j in range(TILE):
                row[j] += weight * max(product[j], np.float32(0))
        for j in range(TILE):
            row[j] *= factor


@jit
def _score(order):
    """Return the score of a key's upper half."""
    flipped = 0xFFFFFFFF - (order >> 31) * 0x7FFFFFFF  # only the sign, or all bits
    return np.uint32(order ^ flipped).view(np.float32)


@jit
def push(scores, n, first, kept, keys, count, lowest):
    """Add the entries ``first ..`` of a tile to the candidates; return (their number, lowest).

    Keys up to ``lowest`` are not among the best. There is room for a tile beyond ``2 * kept``.
    """
    floor = _score(np.uint32(lowest >> np.uint64(32)))  # NaN at first: nothing is below
    for j in range(n):
        if scores[j] < floor:
            continue
        score = scores[j] if scores[j] != 0 else np.float32(0)  # -0 is 0
        key = _key(score, first + j)
        if key > lowest:
            keys[count] = key
            count += 1
    if count >= 2 * kept:
        keep_best(keys[:count], kept)
        count = min(count, kept)
        lowest = keys[:count].min() if count else lowest
    return count, lowest


@jit
def _key(score, index):
    """Order by score, NaN first, then by index, the lowest first."""
    if score != score:
        order = np.uint32(0xFFFFFFFF)
    else:
        bits = np.uint32(np.float32(score).view(np.uint32))
        order = np.uint32(~bits) if bits >> 31 else np.uint32(bits | 0x80000000)
    return (np.uint64(order) << np.uint64(32)) | np.uint64(0xFFFFFFFF - index)


@jit
def keep_best(keys, kept):
    """Move the ``kept`` greatest to the front, in any order (quickselect)."""
    low, high = 0, keys.size - 1 if kept < keys.size else 0
    while low < high:
        pivot = keys[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while keys[i] > pivot:
                i += 1
            while keys[j] < pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if kept <= j:
            high = j
        elif kept >= i:
            low = i
        else:
            low = high


@jit
def write_best(keys, kept, scores, indices):
    """Write the best of the candidates, in order."""
    keep_best(keys, kept)
    best = keys[: min(kept, keys.size)]
    best.sort()
    for rank in range(best.size):
        key = best[best.size - 1 - rank]
        scores[rank] = _score(np.uint32(key >> np.uint64(32)))
        indices[rank] = np.int64(0xFFFFFFFF) - np.int64(key & np.uint64(0xFFFFFFFF))


@jit
def _index_topk(
    begin, end, size, first, n_visible, q, k, weights, heads, D, kept, factor, scores, indices
):
    keys, (step,) = k
    M = (size * heads + 7) // 8 * 8
    queries, of_head = np.empty((1, M, D), np.float32), np.empty((size, heads), np.float32)
    products, tile = np.empty((1, M, TILE), np.float32), np.empty((size, TILE), np.float32)
    candidates = np.empty((size, 2 * kept + TILE), np.uint64)
    counts, lowest = np.empty(size, np.int64), np.empty(size, np.uint64)
    at = np.zeros(TILE, np.int64)
    for block in range(begin, end):
        start, stop = block * size, min((block + 1) * size, len(n_visible))
        load_queries(q, weights, heads, start, stop, queries, of_head)
        counts[:] = 0
        lowest[:] = 0
        t = start
        while t < stop:  # queries of one sequence
            last = t
            seen = 0
            while last < stop and first[last] == first[t]:
                seen = max(seen, n_visible[last])
                last += 1
            if kept == 0:
                seen = 0
            for i in range(0, seen, TILE):
                n = min(TILE, seen - i)
                for j in range(TILE):
                    at[j] = (first[t] + i + min(j, n - 1)) * step
                score_tile(queries, of_head, stop - start, keys, at, n, factor, products, tile)
                for own in range(t - start, last - start):
                    visible = min(n, n_visible[start + own] - i)
                    counts[own], lowest[own] = push(
                        tile[own], visible, i, kept, candidates[own], counts[own], lowest[own]
                    )
            t = last
        for own in range(stop - start):
            found = candidates[own, : counts[own]]
            write_best(found, kept, scores[start + own], indices[start + own])
