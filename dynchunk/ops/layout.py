"""What operations over chunks are told instead of ``Chunks``: a few integers per entry and query.

They are plain tensors, built once outside compiled code and shared by all layers. Kernels never
see a mask of queries times keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk._checks import require, require_choice, require_int
from dynchunk.chunks import Chunks, Kind, SequenceOffsets, as_cu_seqlens

COVERS = ("window", "tail")


class Spans(NamedTuple):
    """The tokens that each of N entries pools.

    Entry i pools the tokens ``starts[i] .. ends[i] - 1``; an open chunk pools nothing. With
    overlap it also pools ``before[i] .. starts[i] - 1``, the chunk in front of it in the same
    sequence: no token for the first chunk of a sequence and for an open one.
    """

    before: Tensor | None  #: int64 [N], or None without overlap
    starts: Tensor  #: int64 [N], the boundaries: first token of each chunk
    ends: Tensor  #: int64 [N], one past the last token

    @classmethod
    def of(cls, chunks: Chunks, *, overlap: bool = False) -> Spans:
        """Derive the spans of all chunks, open ones included.

        Examples
        --------
        >>> Spans.of(Chunks.fixed(2, 5), overlap=True)
        Spans(before=tensor([0, 0, 4]), starts=tensor([0, 2, 4]), ends=tensor([2, 4, 4]))
        """
        starts = chunks.starts
        follows = chunks.is_closed & (chunks.kinds != Kind.START)
        before = torch.where(follows, starts.roll(1), starts) if overlap else None
        return cls(before, starts, torch.where(chunks.is_closed, chunks.ends, starts))


class Reads(NamedTuple):
    """What each of S queries reads in each of G views, and where sequences and chunks lie.

    The queries are the last ones of each sequence, and the rows of k and v its last tokens: a whole
    prompt, the rest of one, and one new token are the same case. In view g, query i reads the
    first ``n_visible[g, i]`` entries of its own sequence and the rows of k from
    ``raw_start[g, i]`` to its own token. All positions are rows: of q, of k, or of the entries of
    all views, one view after another.
    """

    cu_seqlens_q: Tensor  #: int64 [B+1], offsets of each sequence's queries
    cu_seqlens_k: Tensor  #: int64 [B+1], offsets of each sequence's raw tokens
    cu_entries: Tensor  #: int64 [G, B+1], offsets of each sequence's entries (or chunks)
    starts: Tensor  #: int64 [N], the boundaries of all views as rows of k
    n_visible: Tensor  #: int64 [G, S]
    raw_start: Tensor  #: int64 [G, S], the row after the query's own where it reads no raw token

    @classmethod
    def of(
        cls,
        chunks: Chunks | Sequence[Chunks],
        *,
        window: int,
        cover: str = "window",
        cu_seqlens_q: SequenceOffsets | None = None,
        cu_seqlens_k: SequenceOffsets | None = None,
    ) -> Reads:
        """Derive what the queries read.

        Parameters
        ----------
        chunks : Chunks, or a sequence of G of them
            One layout for all KV heads, or G views of the same sequences: KV heads are split over
            them in order, H_kv / G each.
        window : int >= 0
            Raw tokens that every query reads, itself included.
        cover : {"window", "tail"}
            ``"window"``: all visible entries and the last ``window`` tokens, which may overlap.
            ``"tail"``: the visible entries that lie before the last ``window`` tokens, and all raw
            tokens from the first chunk not so covered on: nothing twice, nothing unseen.
        cu_seqlens_q, cu_seqlens_k : offsets [B+1], optional
            How many of each sequence's last tokens q has, and k and v have. Default: all.

        Raises
        ------
        ValueError
            Also if a query would read a raw token that k does not have.

        Examples
        --------
        >>> grid = Chunks.fixed(2, 5)
        >>> Reads.of(grid, window=1).n_visible, Reads.of(grid, window=1).raw_start
        (tensor([[0, 1, 1, 2, 2]]), tensor([[0, 1, 2, 3, 4]]))
        >>> tail = Reads.of(grid, window=1, cover="tail")
        >>> tail.n_visible, tail.raw_start
        (tensor([[0, 0, 1, 1, 2]]), tensor([[0, 0, 2, 2, 4]]))
        """
        require_int("window", window, 0)
        require_choice("cover", cover, COVERS)
        views = (chunks,) if isinstance(chunks, Chunks) else tuple(chunks)
        require(len(views) > 0, "chunks", "Chunks, or at least one view", chunks)
        cu = views[0].cu_seqlens
        same = all(torch.equal(view.cu_seqlens, cu) for view in views)
        require(same, "chunks", "views of the same sequences", chunks)
        cu_q = _last_tokens("cu_seqlens_q", cu_seqlens_q, cu)
        cu_k = _last_tokens("cu_seqlens_k", cu_seqlens_k, cu)

        sequence = torch.repeat_interleave(cu_q.diff())
        position = torch.arange(len(sequence), device=cu.device) + (cu - cu_q)[1:][sequence]
        read = [_read(view, sequence, position, window, cover) for view in views]
        raw_start = torch.stack([start for _, start in read])
        to_row = (cu_k - cu)[1:]
        is_kept = raw_start + to_row[sequence] >= cu_k[sequence]
        expected = "all tokens that a query reads"
        require(bool((is_kept | (raw_start > position)).all()), "cu_seqlens_k", expected, cu_k)
        sizes = [0, *(len(view) for view in views[:-1])]
        offsets = torch.tensor(sizes, device=cu.device).cumsum(0)
        return cls(
            cu_q,
            cu_k,
            torch.stack([view.cu_chunks for view in views]) + offsets[:, None],
            torch.cat([view.starts + to_row[view.sequence_ids] for view in views]),
            torch.stack([seen for seen, _ in read]),
            raw_start + to_row[sequence],
        )

    def view(self, g: int) -> Reads:
        """Return what queries read in view ``g`` alone."""
        first, last = self.cu_entries[g, 0], self.cu_entries[g, -1]
        return self._replace(
            cu_entries=self.cu_entries[g : g + 1] - first,
            starts=self.starts[first:last],
            n_visible=self.n_visible[g : g + 1],
            raw_start=self.raw_start[g : g + 1],
        )


def _last_tokens(argument: str, offsets: SequenceOffsets | None, cu_seqlens: Tensor) -> Tensor:
    if offsets is None:
        return cu_seqlens
    cu = as_cu_seqlens(offsets, cu_seqlens.device)
    fits = cu.shape == cu_seqlens.shape and bool((cu.diff() <= cu_seqlens.diff()).all())
    require(fits, argument, f"at most the sequences of {cu_seqlens.tolist()}", cu.tolist())
    return cu


def _read(
    chunks: Chunks, sequence: Tensor, position: Tensor, window: int, cover: str
) -> tuple[Tensor, Tensor]:
    """Return (n_visible, first raw token) of queries at ``position``, both int64 [S]."""
    first, begin = chunks.cu_chunks[sequence], chunks.cu_seqlens[sequence]
    # The end of its sequence stands for NEVER: later than its queries, before the next sequence.
    arrival = torch.minimum(chunks.visible_from, chunks.cu_seqlens[chunks.sequence_ids + 1])
    n_visible = torch.searchsorted(arrival, position, right=True) - first
    oldest = position - window + 1
    if cover == "window":
        return n_visible, torch.maximum(begin, oldest)
    n_covered = torch.searchsorted(chunks.ends, oldest, right=True) - first
    n_visible = torch.minimum(n_visible, n_covered.clamp(min=0))
    end_before = torch.nn.functional.pad(chunks.ends, (1, 0))[first + n_visible]
    return n_visible, torch.where(n_visible > 0, end_before, begin)
