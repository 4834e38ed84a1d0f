"""Integers that layers of one policy share while they stream: what is held, what is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dynchunk.attention.layout import sources_of
from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import AsScored, GatedPool, MeanPool, Raw, Rescored
from dynchunk.cache.closings import Closings, Integers, follow
from dynchunk.cache.pages import PagePool, PageTable
from dynchunk.cache.rows import FEW, Move, RowMap, ranges
from dynchunk.cache.segments import Segments
from dynchunk.ops.layout import Reads, Spans


class Closed(NamedTuple):
    """The chunks that new tokens closed, view after view, and the raw rows that they pool."""

    rows: Tensor  #: int64, rows of the step's buffers
    spans: tuple[Spans, ...]  #: per view, positions among ``rows``
    position: tuple[Tensor, ...]  #: int64 [N_g] per view, first token in the sequence
    bias: tuple[Tensor, ...] | None  #: float64 [N_g] per view, for the entries' logits
    to: Tensor  #: int64, rows of the pages, of all views


class Step(NamedTuple):
    """The new tokens of all sequences, S of them, which are the queries."""

    cu_seqlens: Tensor  #: int64 [B+1]
    sequence: Tensor  #: int64 [S]
    position: Tensor  #: int64 [S], counted from the start of the sequence
    n_visible: Tensor  #: int64 [G, S]
    raw_begin: Tensor  #: int64 [G, S], rows of the step's buffers
    raw_end: Tensor  #: int64 [S]
    closed: Closed | None  #: None: no chunk was closed
    move: Move
    is_prefill: bool  #: whether the buffers are packed, and there are more than a few tokens


class StreamLayout:
    """What :class:`~dynchunk.attention.Layout` is for whole sequences, for those that grow.

    Full attention, a policy without boundaries and without a window, has entries too: its tokens,
    each a chunk that is read at once. So has a policy whose chunks leave their raw tokens.

    Parameters
    ----------
    policy : Policy
    segments : Segments
        Of the policy's score.
    layers : int
        How many layers share this.
    page_size : int
    device : torch.device
    """

    def __init__(
        self, policy: Policy, segments: Segments, layers: int, page_size: int, device: torch.device
    ) -> None:
        self.policy, self.segments, self.device = policy, segments, device
        unlimited = policy.boundaries is None and policy.window is None
        self.is_full = unlimited or isinstance(policy.reduction, Raw)
        self._overlap = isinstance(policy.reduction, GatedPool) and policy.reduction.overlap
        batch, views = len(segments.lengths), len(policy.views)
        #: Which source of chunks each view comes from.
        self.sources = sources_of(policy)
        self.moved = [[Closings() for _ in range(batch)] for _ in range(views)]
        self.map = RowMap(batch)
        self.table = PageTable.empty(PagePool(page_size, layers), views, batch)
        self.step: Step | None = None
        self._prefill: tuple[Reads, tuple[Tensor, ...]] | None = None

    @property
    def batch(self) -> int:
        """Number B of sequences."""
        return len(self.segments.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping that is not on the device."""
        held = [pages for table in self.tables for of_view in table.held for pages in of_view]
        moved = [one for of_view in self.moved for one in of_view]
        return 8 * sum(map(len, held)) + sum(one.nbytes for one in moved)

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """All pages, those of entries first."""
        return (self.table,)

    @property
    def maps(self) -> dict[str, RowMap]:
        """Which tokens have rows in a layer's buffers, by the name of the buffers."""
        return {"rows": self.map}

    def closings(self, g: int, b: int) -> Closings:
        """Return the closed chunks of a sequence in one view."""
        if isinstance(self.policy.views[g], AsScored | Rescored):
            return self.segments.closings[self.sources[g]][b]
        return self.moved[g][b]

    def entries(self, g: int, b: int) -> int:
        """Return how many entries a sequence has in one view."""
        return int(self.segments.lengths[b]) if self.is_full else len(self.closings(g, b))

    def entries_at(self, g: int, b: int, n: int) -> int:
        """Return how many it had when ``n`` tokens had come."""
        return n if self.is_full else self.closings(g, b).count(n)

    def first_needed(self, b: int, n: int) -> int:
        """Return the first raw token that is needed when ``n`` tokens have come; n for none."""
        if self.is_full:
            return n
        policy = self.policy
        window = n + 1 if policy.window is None else policy.window
        first = min(n, max(0, n - window + 1)) if policy.cover == "window" else n
        for g in range(len(policy.views)):
            closings = self.closings(g, b)
            closed = closings.count(n)
            if policy.boundaries is not None:
                first = min(first, closings.start(max(0, closed - self._overlap)))
            if policy.cover == "tail":
                covered = int(np.searchsorted(closings.ends, n - window + 1, side="right"))
                first = min(first, closings.start(min(closed, covered)))
        return first

    def covered(self, b: int, token: int, n: int) -> tuple[int, int]:
        """Return how many chunks are before a token's window, and the first token after them.

        Of the chunks of the first view that are closed when ``n`` tokens have come.
        """
        closings, window = self.closings(0, b), self.policy.window
        assert window is not None
        before = int(np.searchsorted(closings.ends, token - window + 1, side="right"))
        chunks = min(before, closings.count(n))
        return chunks, closings.start(chunks)

    def scores_needed(self, b: int, n: int) -> int:
        """Return the first token whose score the entries of open chunks need."""
        first = n
        for g, source in enumerate(self.sources):
            closings = self.closings(g, b)
            start = closings.start(closings.count(n))
            first = min(first, self.segments.start_before(source, b, start, n))
        return first

    def plan(self, counts: Integers) -> Integers:
        """Hear of new tokens before they are scored; return the least lengths to go back to."""
        return np.zeros(self.batch, np.int64)

    def append(self, counts: Integers, floor: Integers) -> None:
        """Follow the segments, which have new tokens, and derive what the step does.

        ``floor`` [B] says to how many tokens each sequence may be cropped after it.
        """
        self._prefill = None
        old_entries = self._follow(counts)
        lengths = self.segments.lengths
        hold = lengths.copy() if self.is_full else self._first_needed(floor)
        begin = np.maximum(hold, self.map.begin)
        few = counts.max(initial=0) <= FEW
        packed = self.is_full or not few or self._is_repacked()
        move = self.map.extend(counts, begin, packed=packed)
        sequence = np.repeat(np.arange(self.batch), counts)
        position = ranges(lengths - counts, counts)
        n_visible, raw_start = self._reads(sequence, position, counts)
        row = move.row_of_first[sequence]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        self.step = Step(
            self.tensor(offsets),
            self.tensor(sequence),
            self.tensor(position),
            self.tensor(n_visible),
            self.tensor(row + raw_start),
            self.tensor(row + position + 1),
            self._closed(old_entries, move.row_of_first),
            move,
            is_prefill=not few,
        )

    def reads(self) -> tuple[Reads, tuple[Tensor, ...]]:
        """Return what a prefill reads in packed rows, and where the entries of each view are."""
        if self._prefill is None:
            self._prefill = self._derive_reads()
        return self._prefill

    def _derive_reads(self) -> tuple[Reads, tuple[Tensor, ...]]:
        step, views = self.step, range(len(self.policy.views))
        assert step is not None
        assert step.move.packed is not None
        counts = np.array([[self.entries(g, b) for b in range(self.batch)] for g in views])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        firsts = [offsets[g * self.batch : (g + 1) * self.batch + 1] for g in views]
        rows = tuple(
            self.tensor(np.concatenate([self.table.rows(g, b, 0, n) for b, n in enumerate(of_g)]))
            for g, of_g in enumerate(counts.tolist())
        )
        starts = [
            self._starts(g, b) + step.move.row_of_first[b] for g in views for b in range(self.batch)
        ]
        cu_k = self.tensor(step.move.packed.offsets)
        entries = (self.tensor(np.stack(firsts)), self.tensor(np.concatenate(starts)))
        return Reads(step.cu_seqlens, cu_k, *entries, step.n_visible, step.raw_begin), rows

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b, as the segments have."""
        for map in self.maps.values():
            map.truncate(b, n)
        for g in range(len(self.policy.views)):
            self.moved[g][b].truncate(n)
            self.table.truncate(g, b, self.entries(g, b))
        self.step = None

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order, as the segments have."""
        for map in self.maps.values():
            map.select(index)
        for table in self.tables:
            table.select(index.tolist())
        self.moved = [[closings[b].copy() for b in index] for closings in self.moved]
        self.step = None

    def fork(self, segments: Segments) -> Self:
        """Return the same state on its own, with the same pages."""
        other = type(self)(self.policy, segments, 0, self.table.pool.page_size, self.device)
        other.map, other.table = self.map.copy(), self.table.fork()
        other.moved = [[one.copy() for one in closings] for closings in self.moved]
        return other

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Yield what has to hold of this kind of layout, and whether it does."""
        yield from ()

    def state(self) -> dict[str, Integers]:
        """Return what a file has to hold beside closings and raw rows."""
        return {}

    def restore(self, state: dict[str, Integers]) -> None:
        """Take what :meth:`state` returned, when closings and lengths are there."""

    def tensor(self, integers: Integers) -> Tensor:
        """Return integers as a tensor on the device."""
        return torch.from_numpy(np.ascontiguousarray(integers)).to(self.device)

    def _is_repacked(self) -> bool:
        """Whether much of the raw rows is let go of in this step."""
        return False

    def _first_needed(self, n: Integers) -> Integers:
        return np.array([self.first_needed(b, int(m)) for b, m in enumerate(n)], np.int64)

    def _follow(self, counts: Integers) -> list[list[int]]:
        """Bring views and pages up to date; return the numbers of entries before, [G][B]."""
        lengths = self.segments.lengths
        old = []
        for g, (view, source) in enumerate(zip(self.policy.views, self.sources, strict=True)):
            of_view = []
            for b, n in enumerate(lengths.tolist()):
                base = self.segments.closings[source][b]
                follow(view, base, self.moved[g][b], n)
                before = n - int(counts[b])
                of_view.append(self.entries_at(g, b, before))
                self.table.extend(g, b, of_view[-1], self.entries(g, b))
            old.append(of_view)
        return old

    def _reads(
        self, sequence: Integers, position: Integers, counts: Integers
    ) -> tuple[Integers, Integers]:
        """Return n_visible and the first raw token of each query, both [G, S]."""
        policy, views = self.policy, len(self.policy.views)
        window = int(position.max(initial=0)) + 1 if policy.window is None else policy.window
        oldest = position - window + 1
        if self.is_full:
            return position[None] + 1, position[None] + 1
        n_visible = np.zeros((views, len(position)), np.int64)
        raw_start = np.maximum(0, oldest)[None].repeat(views, 0)
        pieces = np.split(np.arange(len(position)), np.cumsum(counts)[:-1])
        for g in range(views):
            for b in counts.nonzero()[0].tolist():
                closings, own = self.closings(g, b), pieces[b]
                seen = np.searchsorted(closings.known, position[own], side="right")
                if policy.cover == "tail":
                    covered = np.searchsorted(closings.ends, oldest[own], side="right")
                    seen = np.minimum(seen, covered)
                    first = int(seen.min())
                    bounds = closings.starts(first, int(seen.max()) + 1)
                    raw_start[g, own] = bounds[seen - first]
                n_visible[g, own] = seen
        return n_visible, raw_start

    def _starts(self, g: int, b: int) -> Integers:
        """Return the first tokens of all chunks with an entry."""
        n = self.entries(g, b)
        return np.arange(n) if self.is_full else self.closings(g, b).starts(0, n)

    def _closed(self, old: list[list[int]], row_of_first: Integers) -> Closed | None:
        """Describe the chunks with an entry number from ``old`` [G][B] on."""
        new = [
            [self._new_entries(g, b, first) for b, first in enumerate(of_view)]
            for g, of_view in enumerate(old)
        ]
        if not any(len(one.to) for of_view in new for one in of_view):
            return None
        to = np.concatenate([one.to for of_view in new for one in of_view])
        if self.is_full:
            nothing = self.tensor(np.zeros(0, np.int64))
            return Closed(nothing, (), (), None, self.tensor(to))
        low, high = _pooled(new)
        shift = np.cumsum(high - low) - high  # from positions to the pooled rows
        spans, positions, biases = [], [], []
        for g, of_view in enumerate(new):
            of_entry = np.repeat(np.arange(self.batch), [len(one.to) for one in of_view])
            joined = _NewEntries(*(np.concatenate(x) for x in zip(*of_view, strict=True)))
            before, starts, ends = (self.tensor(x + shift[of_entry]) for x in joined[:3])
            spans.append(Spans(before if self._overlap else None, starts, ends))
            positions.append(self.tensor(joined.starts))
            biases.append(self._bias(g, of_entry, joined.starts, joined.ends))
        return Closed(
            self.tensor(ranges(row_of_first + low, high - low)),
            tuple(spans),
            tuple(positions),
            None if biases[0] is None else tuple(b for b in biases if b is not None),
            self.tensor(to),
        )

    def _new_entries(self, g: int, b: int, first: int) -> _NewEntries:
        n = self.entries(g, b)
        to = self.table.rows(g, b, first, n)
        if self.is_full:
            return _NewEntries(to, to, to, to)
        closings = self.closings(g, b)
        starts = closings.starts(first, n)
        before = starts
        if self._overlap and n > first:
            before = closings.starts(max(0, first - 1), n - 1)
            before = np.concatenate([starts[:1], before]) if first == 0 else before
        return _NewEntries(before, starts, closings.ends[first:n], to)

    def _bias(self, g: int, b: Integers, starts: Integers, ends: Integers) -> Tensor | None:
        reduction = self.policy.reduction
        by_length = isinstance(reduction, MeanPool) and reduction.log_length
        if not by_length and not self.segments.has_credit:
            return None
        lengths = self.tensor(ends - starts).double()
        bias = lengths.log() if by_length else torch.zeros_like(lengths)
        if not self.segments.has_credit:
            return bias
        source, now = self.sources[g], self.segments.lengths
        base = [
            self.segments.start_before(source, row, start, int(now[row]))
            for row, start in zip(b.tolist(), starts.tolist(), strict=True)
        ]
        credit = self.segments.credit(source, b, np.array(base, np.int64))
        return bias if credit is None else bias + credit


class _NewEntries(NamedTuple):
    """Chunks of one sequence that got an entry, positions counted from its first token."""

    before: Integers  #: first token of the chunk before, with overlap
    starts: Integers
    ends: Integers
    to: Integers  #: rows of the pages


def _pooled(new: list[list[_NewEntries]]) -> tuple[Integers, Integers]:
    """Return the first token that the new entries of each sequence pool, and one past the last."""
    low, high = np.zeros((2, len(new[0])), np.int64)
    for b, of_sequence in enumerate(zip(*new, strict=True)):
        low[b] = min((int(one.before[0]) for one in of_sequence if len(one.to)), default=0)
        high[b] = max((int(one.ends[-1]) for one in of_sequence if len(one.to)), default=0)
    return low, high
