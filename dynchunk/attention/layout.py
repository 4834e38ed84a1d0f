"""Chunks and integers that all layers of one policy share, derived once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import GatedPool, MeanPool, Rescored
from dynchunk.chunks import Chunks, SequenceOffsets, as_cu_seqlens
from dynchunk.ops.layout import Reads, Spans


@dataclass(frozen=True, eq=False)
class Layout:
    """What a layer's queries read and its entries pool.

    Build one with :meth:`of` where several layers of one policy share it.
    """

    views: tuple[Chunks, ...]
    reads: Reads
    spans: tuple[Spans, ...]  #: per view
    query_rows: Tensor | None  #: int64 [S], the tokens that are queries; None: all
    query_position: Tensor  #: int64 [S], counted from the start of the sequence
    position: Tensor  #: int64 [T], of the raw tokens
    entry_position: tuple[Tensor, ...]  #: int64 [N_g] per view: of the chunk's first token
    bias: tuple[Tensor, ...] | None  #: float64 [N_g] per view, for the logits of entries

    @classmethod
    def of(
        cls,
        policy: Policy,
        chunks: Chunks | Sequence[Chunks],
        *,
        log_p: Tensor | Sequence[Tensor | None] | None = None,
        cu_seqlens_q: SequenceOffsets | None = None,
    ) -> Layout:
        """Derive the layout of a policy.

        Parameters
        ----------
        policy : Policy
        chunks : Chunks or a sequence of them
            Those of the policy's score, then those of each view on another score. The policy
            derives the other views.
        log_p : floating tensor [T], or one for each of ``chunks``, optional
            A bias for the entry of the chunk that starts at a token; in a derived view, of the
            chunk that starts inside the one that starts there.
        cu_seqlens_q : offsets [B+1], optional
            How many of each sequence's last tokens are queries. Default: all.

        Examples
        --------
        >>> from dynchunk.attention import csa
        >>> Layout.of(csa(), Chunks.fixed(4, 9)).entry_position
        (tensor([0, 4, 8]),)
        """
        pooled = not policy.keeps_raw_chunks
        require(pooled, "policy", "one that pools (a Cache is for this one)", policy.reduction)
        scored = (chunks,) if isinstance(chunks, Chunks) else tuple(chunks)
        views = _views(policy, scored)
        cu = views[0].cu_seqlens
        window = max(1, views[0].num_tokens) if policy.window is None else policy.window
        overlap = isinstance(policy.reduction, GatedPool) and policy.reduction.overlap
        cu_q = cu if cu_seqlens_q is None else as_cu_seqlens(cu_seqlens_q, cu.device)
        late = torch.repeat_interleave(cu.diff() - cu_q.diff(), cu_q.diff())
        query_position = positions(cu_q) + late
        begin = torch.repeat_interleave(cu[:-1], cu_q.diff())
        return cls(
            views,
            Reads.of(views, window=window, cover=policy.cover, cu_seqlens_q=cu_q),
            tuple(Spans.of(view, overlap=overlap) for view in views),
            None if cu_seqlens_q is None else begin + query_position,
            query_position,
            positions(cu),
            tuple(view.starts - cu[view.sequence_ids] for view in views),
            _bias(policy, scored, views, log_p),
        )

    def queries(self, x: Tensor) -> Tensor:
        """Return the rows of the queries, [S, ..], among those of all tokens, [T, ..]."""
        return x if self.query_rows is None else x[self.query_rows]

    def first_entry(self, view: int) -> Tensor:
        """Return the row of the first entry of each query's sequence in one view, int64 [S]."""
        queries = self.reads.cu_seqlens_q.diff()
        return torch.repeat_interleave(self.views[view].cu_chunks[:-1], queries)

    def read(self, view: int) -> Reads:
        """Return what queries read in one view alone."""
        return self.reads if len(self.views) == 1 else self.reads.view(view)


def positions(cu_seqlens: Tensor) -> Tensor:
    """Count the tokens before each in its sequence.

    >>> positions(torch.tensor([0, 2, 5]))
    tensor([0, 1, 0, 1, 2])
    """
    token = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    return token - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())


def one_chunk_each(cu_seqlens: SequenceOffsets) -> Chunks:
    """Return chunks without entries: every sequence one open chunk.

    >>> one_chunk_each([0, 3, 5]).n_visible
    tensor([0, 0, 0, 0, 0])
    """
    cu = as_cu_seqlens(cu_seqlens)
    return Chunks.from_boundaries(cu.new_empty(0), cu)


def sources_of(policy: Policy) -> list[int]:
    """Return which of the given chunks each view comes from."""
    count, sources = 0, []
    for view in policy.views:
        count += isinstance(view, Rescored)
        sources.append(count if isinstance(view, Rescored) else 0)
    return sources


def _views(policy: Policy, scored: Sequence[Chunks]) -> tuple[Chunks, ...]:
    sources = sources_of(policy)
    n = max(sources) + 1
    expected = "Chunks" if n == 1 else f"{n} Chunks: {n - 1} views are on another score"
    require(len(scored) == n, "chunks", expected, scored)
    return tuple(policy.view(scored[source], g) for g, source in enumerate(sources))


def _bias(
    policy: Policy,
    scored: Sequence[Chunks],
    views: tuple[Chunks, ...],
    log_p: Tensor | Sequence[Tensor | None] | None,
) -> tuple[Tensor, ...] | None:
    by_length = isinstance(policy.reduction, MeanPool) and policy.reduction.log_length
    of_score = (log_p,) * len(scored) if log_p is None or isinstance(log_p, Tensor) else log_p
    if not by_length and all(of_one is None for of_one in of_score):
        return None
    total = []
    for view, source in zip(views, sources_of(policy), strict=True):
        lengths = view.lengths.double()
        bias = lengths.log() if by_length else torch.zeros_like(lengths)
        of_token, base = of_score[source], scored[source]
        if of_token is not None:
            bias = bias + of_token[base.starts[base.ids[view.starts]]]
        total.append(bias)
    return tuple(total)
