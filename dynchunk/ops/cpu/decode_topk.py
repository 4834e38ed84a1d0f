"""Index scores and exact top-k over a paged cache in numba: the best of parts, then of all."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dynchunk.ops.cpu import jit
from dynchunk.ops.cpu._arrays import flat, require_dtypes
from dynchunk.ops.cpu._scores import TILE, load_keys, score_tile
from dynchunk.ops.cpu._threads import run
from dynchunk.ops.cpu.decode import PARTS, check_places, part_of
from dynchunk.ops.cpu.index_topk import keep_best, load_queries, push, take_best, write_best


def decode_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices), both [S, topk]."""
    require_dtypes(q, k, weights)
    at = [x.contiguous().numpy() for x in (pages, sequence, n_visible)]
    nothing = np.zeros((1, len(q)), np.int64)
    check_places(*at, nothing, nothing[0], 0, k.shape[1])
    scores = torch.from_numpy(np.full((len(q), topk), -np.inf, np.float32))
    indices = torch.from_numpy(np.full((len(q), topk), -1, np.int64))
    kept = min(topk, max(int(n_visible.max()), 0)) if len(q) else 0
    keys = np.empty((len(q), PARTS, kept), np.uint64)
    counts = np.empty((len(q), PARTS), np.int64)
    run(
        _best_of_parts,
        counts.size,
        *at,
        flat(q),
        flat(k),
        flat(weights),
        *q.shape[1:],
        *k.shape[:2],
        np.float32(scale),
        keys,
        counts,
    )
    best = np.empty((len(q), kept), np.uint64)
    _best(keys, counts, best)
    write_best(best, scores.numpy(), indices.numpy())
    return scores, indices


@jit
def _best_of_parts(
    begin,
    end,
    pages,
    sequence,
    n_visible,
    q,
    k,
    weights,
    heads,
    D,
    n_pages,
    page_size,
    factor,
    keys,
    counts,
):
    stored, (page_step, row_step) = k
    kept = keys.shape[2]
    queries, of_head = np.empty((heads, D), np.float32), np.empty(heads, np.float32)
    transposed, tile = np.empty((D, TILE), np.float32), np.empty((1, TILE), np.float32)
    candidates = np.empty(2 * kept + TILE, np.uint64)
    at, places = np.zeros(TILE, np.int64), np.empty(TILE + 1, np.int64)
    for task in range(begin, end):
        s, part = task // PARTS, task % PARTS
        first, last = part_of(part, n_visible[0, s])
        if kept == 0:
            last = first
        load_queries(q, weights, heads, s, s + 1, queries, of_head)
        count, lowest = 0, np.uint64(0)
        for i in range(first, last, TILE):
            n = min(TILE, last - i)
            for j in range(n):
                row = i + j
                page = pages[0, sequence[s], row // page_size]
                if page < 0 or page >= n_pages:
                    raise IndexError("pages: expected pages of k for all visible entries")
                at[j] = page * page_step + row % page_size * row_step
            load_keys(stored, at, n, transposed)
            score_tile(queries, of_head, heads, 1, transposed, factor, tile)
            count, lowest = push(tile[0], n, i, kept, places, candidates, count, lowest)
        found = candidates[:count]
        if count > kept:
            keep_best(found, kept)
        counts[s, part] = min(count, kept)
        keys[s, part, : counts[s, part]] = found[: counts[s, part]]


@jit
def _best(keys, counts, best):
    S, parts, kept = keys.shape
    found = np.empty(parts * kept, np.uint64)
    for s in range(S):
        n = 0
        for part in range(parts):
            found[n : n + counts[s, part]] = keys[s, part, : counts[s, part]]
            n += counts[s, part]
        take_best(found[:n], best[s])
