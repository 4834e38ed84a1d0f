"""Index scores and exact top-k, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops._registration import wide_dtype


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
    wide = wide_dtype(q, k, weights)
    indices = torch.full((len(q), topk), -1, device=q.device)
    top_scores = q.new_full(indices.shape, -torch.inf, dtype=wide)
    for queries, entries in _sequences(cu_seqlens_q, cu_entries, len(k)):
        dots = _dots(q[queries].to(wide), k[entries].to(wide)).relu()
        scores = dots.new_zeros(dots.shape[1:])
        for head, of_head in enumerate(dots):
            scores += weights[queries, head, None].to(wide) * of_head
        rank = torch.arange(scores.shape[1], device=q.device)
        is_visible = rank < n_visible[0, queries, None]
        scores = (scores * scale).where(is_visible, -torch.inf)
        # The sort is stable and the visible entries come first: they stay in front of the others.
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        count = min(topk, len(rank))
        indices[queries, :count] = order.where(is_visible, -1)[:, :count]
        top_scores[queries, :count] = scores[:, :count]
    return top_scores, indices


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
    """Return the gradients of q, k and weights; integers have none."""
    wide = wide_dtype(q, k, weights)
    grad_q, grad_k, grad_weights = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, weights))
    for queries, entries in _sequences(cu_seqlens_q, cu_entries, len(k)):
        of_q, of_k = q[queries].to(wide), k[entries].to(wide)
        of_k = of_k.where(of_k.isfinite(), 0)  # rows that nobody sees may hold anything
        dots = _dots(of_q, of_k)
        n = len(of_k)
        at = indices[queries].where(indices[queries] >= 0, n)
        grad = dots.new_zeros(len(of_q), n + 1)
        grad = grad.scatter_(1, at, grad_scores[queries] * scale)[:, :n]
        grad_dots = grad * weights[queries].to(wide).T[..., None] * (dots > 0)
        grad_q[queries] = torch.einsum("hts,sd->thd", grad_dots, of_k)
        grad_k[entries] = torch.einsum("hts,thd->sd", grad_dots, of_q)
        grad_weights[queries] = torch.einsum("hts,ts->th", dots.relu(), grad)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_weights.to(weights.dtype)


def _dots(q: Tensor, k: Tensor) -> Tensor:
    """Dot products [H, S, N], channel by channel: a matmul's bits depend on the other rows."""
    dots = q.new_zeros(q.shape[1], len(q), len(k))
    for channel in range(q.shape[2]):
        dots += q[:, :, channel].T[..., None] * k[:, channel]
    return dots


def _sequences(
    cu_seqlens_q: Tensor, cu_entries: Tensor, n_entries: int
) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the entries of each sequence."""
    of_q, of_entries = cu_seqlens_q.tolist(), cu_entries[0].tolist()
    expected = f"{of_entries[-1]} rows, as laid out"
    require(n_entries == of_entries[-1], "k", expected, n_entries)
    for (a, b), (first, last) in zip(pairwise(of_q), pairwise(of_entries), strict=True):
        yield slice(a, b), slice(first, last)
