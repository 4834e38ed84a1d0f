"""Which entries a query reads: the lightning indexer, and the loss that trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynchunk.attention.compressor import Compressor
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.rope import rotate
from dynchunk.attention.specs import Reduction, Rope, TopK
from dynchunk.ops.index_topk import index_topk
from dynchunk.ops.layout import Spans


class Choice(NamedTuple):
    """The entries that an indexer chose in each of G views."""

    scores: list[Tensor]  #: [S, K] per view, with a gradient
    indices: list[Tensor]  #: int64 [S, K] per view, -1 = none


class Choosing(ABC):
    """How a lightning indexer chooses, wherever its weights are: a subclass projects."""

    topk: TopK
    rope: Rope | None

    def choose(self, x: Tensor, query: Tensor, layout: Layout) -> Choice:
        """Choose for every query, from hidden states [T, dim] and ``query`` [S, query_dim]."""
        q, weights = self.queries(layout.queries(x), query, layout.query_position)
        choice = Choice([], [])
        for view, keys in enumerate(self.keys(x, layout.spans, layout.entry_position)):
            best = index_topk(q, keys, weights, layout.read(view), self.topk.k)
            choice.scores.append(best.scores)
            choice.indices.append(best.indices)
        return choice

    def queries(self, x: Tensor, query: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return index queries [S, heads, dim] after RoPE and the weights [S, heads] of heads."""
        q, weights = self.project(x, query)
        q = q.reshape(len(q), self.topk.heads, self.topk.dim)
        return rotate(q, position, self.rope), weights * self.topk.heads**-0.5

    def keys(self, x: Tensor, views: Sequence[Spans], position: Sequence[Tensor]) -> list[Tensor]:
        """Return index keys [N_g, dim] after RoPE, of spans of the hidden states in each view."""
        entries = zip(self.pool(x, views), position, strict=True)
        return [rotate(of_view[:, 0], at, self.rope) for of_view, at in entries]

    @abstractmethod
    def project(self, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [S, heads * dim] before RoPE and the weights [S, heads] as projected."""

    @abstractmethod
    def pool(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        """Return the indexer's entries [N_g, 1, dim] of each view before RoPE."""


class Indexer(Choosing, nn.Module):
    """DeepSeek V4's lightning indexer: own small entries, scored by several small heads.

    Parameters
    ----------
    topk : TopK
    reduction : GatedPool or MeanPool
    dim : int
        Size of the hidden states.
    query_dim : int
        Size of what the queries are projected from.
    views, slots : int
    rope : Rope or None

    Examples
    --------
    >>> from dynchunk.attention import hca
    >>> from dynchunk.chunks import Chunks
    >>> topk = TopK(2, heads=2, dim=4)
    >>> indexer = Indexer(topk, hca().reduction, 8, 8, views=1, slots=3, rope=None)
    >>> x = torch.randn(7, 8)
    >>> indexer(x, x, Layout.of(hca(), Chunks.fixed(3, 7))).indices[0][:3]
    tensor([[-1, -1],
            [-1, -1],
            [ 0, -1]])
    """

    def __init__(
        self,
        topk: TopK,
        reduction: Reduction,
        dim: int,
        query_dim: int,
        *,
        views: int,
        slots: int,
        rope: Rope | None,
    ) -> None:
        super().__init__()
        self.topk, self.rope = topk, rope
        self.compressor = Compressor(reduction, dim, views, topk.dim, slots)
        self.q_proj = nn.Linear(query_dim, topk.heads * topk.dim, bias=False)
        self.weights_proj = nn.Linear(dim, topk.heads, bias=False)

    @classmethod
    def of(cls, policy: Policy, dim: int, query_dim: int, head_dim: int) -> Indexer | None:
        """Return the indexer of a policy, None if it has none."""
        topk, rope = policy.selection, policy.rope
        if policy.boundaries is None or not isinstance(topk, TopK):
            return None
        return cls(
            topk,
            policy.reduction,
            dim,
            query_dim,
            views=len(policy.views),
            slots=policy.max_length,
            rope=None if rope is None else rope.for_index(head_dim, topk.dim),
        )

    def forward(self, x: Tensor, query: Tensor, layout: Layout) -> Choice:
        """Choose for every query, from hidden states [T, dim] and ``query`` [S, query_dim]."""
        return self.choose(x, query, layout)

    def project(self, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [S, heads * dim] before RoPE and the weights [S, heads] as projected."""
        return self.q_proj(query), self.weights_proj(x)

    def pool(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        """Return the indexer's entries [N_g, 1, dim] of each view before RoPE."""
        return self.compressor.pool(x, views)


def index_loss(
    choice: Choice, q: Tensor, entry_k: list[Tensor], layout: Layout, rope: Rope | None
) -> Tensor:
    """Return the KL divergence of the index scores from the attention over the same entries.

    A choice passes no gradient, so this is what trains an indexer (DeepSeek V3.2, arXiv
    2512.02556): the target is the mean over heads, and only the scores get a gradient. It compares
    entries with each other: where a query reads only one, there is nothing to learn.

    Parameters
    ----------
    choice : Choice
    q : tensor [S, H, D]
    entry_k : tensors [N_g, H_kv / G, D], one per view
        Both before RoPE.
    layout : Layout
    rope : Rope or None

    Returns
    -------
    tensor []
        The mean over views and over the queries that read an entry; zero if none does.
    """
    scale = q.shape[-1] ** -0.5
    q = rotate(q.detach(), layout.query_position, rope)
    views, heads = len(layout.views), entry_k[0].shape[1]
    of_view = q.reshape(len(q), views, heads, q.shape[1] // (views * heads), q.shape[2])
    losses = []
    for view, (scores, indices) in enumerate(zip(*choice, strict=True)):
        chosen = indices >= 0
        reads = chosen.any(-1)
        keys = rotate(entry_k[view].detach(), layout.entry_position[view], rope)
        keys = keys[(indices + layout.first_entry(view)[:, None])[reads].where(chosen[reads], 0)]
        logits = torch.einsum("shrd,skhd->shrk", of_view[reads, view], keys) * scale
        logits = logits.masked_fill(~chosen[reads, None, None], -torch.inf)
        target = logits.softmax(-1).mean((1, 2))
        log_chosen = scores[reads].log_softmax(-1).masked_fill(~chosen[reads], 0)
        divergence = (torch.xlogy(target, target) - target * log_chosen).sum(-1)
        losses.append(divergence.sum() / max(1, len(divergence)))
    return torch.stack(losses).mean()
