"""Index scores and exact top-k over a paged cache: query by query, as over packed keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk.ops.reference.decode import entry_rows
from dynchunk.ops.reference.index_topk import index_topk


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
    found = [index_topk(q[:0], k[:0, 0], weights[:0], *_one(n_visible[:, :0]), topk, scale)]
    for s, b in enumerate(sequence.tolist()):
        own, count = slice(s, s + 1), n_visible[:, s : s + 1]
        rows = k[entry_rows(pages[0, b], count[0], k.shape[1])]
        found.append(index_topk(q[own], rows, weights[own], *_one(count), topk, scale))
    scores, indices = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(indices)


def _one(count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (cu_seqlens_q, cu_entries, n_visible) of one query that sees all entries, or none."""
    of_queries = torch.tensor([0, count.shape[1]], device=count.device)
    return of_queries, torch.nn.functional.pad(count.sum()[None, None], (1, 0)), count
