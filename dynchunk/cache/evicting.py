"""Eviction of whole chunks: which tokens have raw rows, and when chunks are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import Evict
from dynchunk.cache.closings import Integers
from dynchunk.cache.kept import ChunkList
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.rows import FEW, Move, RowMap
from dynchunk.cache.segments import Segments


class Eviction(NamedTuple):
    """What one sequence chooses from, before new tokens come: the same in all layers."""

    sequence: int
    chunks: ChunkList  #: first tokens and lengths of those that may go, the first raw tokens
    budget: int  #: tokens that stay, of them and of those kept before
    raw: Tensor  #: int64, rows of the raw buffers of the tokens held there, in order
    queries: Tensor  #: int64, rows of the buffer of queries


class EvictingLayout(StreamLayout):
    """Raw rows of the tokens that were never before the window of an eviction, and when one is due.

    More than a few new tokens of a sequence are a part of its prompt: nothing is evicted, all raw
    tokens are read. A few new tokens are generated ones. Before they come, chunks are evicted if
    there was a part of a prompt since the last time, or ``observe`` tokens, and if there is a chunk
    before the window. So it does not matter into which parts a prompt is split, and a prompt that
    comes token by token counts as generated.

    Attributes
    ----------
    at : int64 [B]
        Length of each sequence when it last evicted, behind which it cannot go back; 0: never.
    raw : int64 [B]
        Its first raw token: of those before it, layers have what they kept.
    prompt : int64 [B]
        Its length after the last part of a prompt; 0 without one.
    observed : RowMap
        Queries that the next eviction needs.
    evicted : tuple of Eviction
        What happens in this step, before its tokens are stored.
    move : Move
        How the queries of this step are stored.
    """

    def __init__(
        self, policy: Policy, segments: Segments, layers: int, page_size: int, device: torch.device
    ) -> None:
        super().__init__(policy, segments, layers, page_size, device)
        assert isinstance(policy.reduction, Evict)
        self.spec = policy.reduction
        self.at, self.raw, self.prompt = np.zeros((3, self.batch), np.int64)
        self.observed = RowMap(self.batch)
        self.evicted: tuple[Eviction, ...] = ()
        self.move: Move | None = None
        self._planned: tuple[Eviction, ...] = ()

    @property
    def maps(self) -> dict[str, RowMap]:
        """Which tokens have raw rows, and which have queries."""
        return {"rows": self.map, "observed": self.observed}

    def entries(self, g: int, b: int) -> int:
        """Return 0: what is kept is in the layers."""
        return 0

    def entries_at(self, g: int, b: int, n: int) -> int:
        """Return 0."""
        return 0

    def first_needed(self, b: int, n: int) -> int:
        """Return the first raw token."""
        return int(self.raw[b])

    def budget(self, far: int) -> int:
        """Return how many of the first ``far`` tokens stay."""
        first = min(far, self.spec.first)
        return first + int((far - first) / self.spec.ratio)

    def plan(self, counts: Integers) -> Integers:
        """Decide who evicts before the new tokens come; return the least lengths to go back to."""
        lengths, least = self.segments.lengths, self.at.copy()
        waiting = (self.prompt > self.at) | (lengths - self.at >= self.spec.observe)
        planned = []
        for b in np.flatnonzero(waiting & (counts > 0) & (counts <= FEW)).tolist():
            n = int(lengths[b])
            _, far = self.covered(b, n, n)
            if far > self.raw[b]:
                planned.append(self._eviction(b, n, far))
                least[b] = n
        self._planned = tuple(planned)
        return least

    def append(self, counts: Integers, floor: Integers) -> None:
        """Let go of what is evicted, and follow the segments."""
        self.evicted, self._planned = self._planned, ()
        for one in self.evicted:
            b = one.sequence
            self.at[b] = self.observed.end[b]
            self.raw[b] = self.map.begin[b] = int(one.chunks[:, -1].sum())
        self.prompt = np.where(counts > FEW, self.segments.lengths, self.prompt)
        needed = np.maximum(self.at, floor - self.spec.observe)
        needed = np.maximum(needed, self.observed.begin)
        self.observed.begin = np.minimum(needed, self.observed.end)
        self.move = self.observed.extend(counts, needed, packed=self._is_repacked())
        super().append(counts, floor)

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b: 0, or not behind its last eviction."""
        super().truncate(b, n)
        self.prompt[b] = min(self.prompt[b], n)
        if n == 0:
            self.at[b] = self.raw[b] = 0

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order, as the segments have."""
        super().select(index)
        self.at, self.raw, self.prompt = self.at[index], self.raw[index], self.prompt[index]

    def fork(self, segments: Segments) -> EvictingLayout:
        """Return the same state on its own."""
        other = super().fork(segments)
        other.at, other.raw, other.prompt = self.at.copy(), self.raw.copy(), self.prompt.copy()
        other.observed = self.observed.copy()
        return other

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Yield what has to hold of evictions."""
        lengths = self.segments.lengths
        yield (
            "0 <= raw <= at <= length",
            bool(((self.raw >= 0) & (self.raw <= self.at) & (self.at <= lengths)).all()),
        )
        yield "queries since the last eviction", bool((self.observed.begin >= self.at).all())
        for b in range(self.batch):
            ends = self.closings(0, b).ends
            yield "raw tokens begin with a chunk", bool(self.raw[b] == 0 or self.raw[b] in ends)

    def state(self) -> dict[str, Integers]:
        """Return what a file has to hold beside closings and raw rows."""
        begin = self.observed.begin
        return {"at": self.at, "raw": self.raw, "prompt": self.prompt, "observed": begin}

    def restore(self, state: dict[str, Integers]) -> None:
        """Take what :meth:`state` returned, when closings and lengths are there."""
        self.at, self.raw, self.prompt = (state[name] for name in ("at", "raw", "prompt"))
        self.observed.place(state["observed"], self.segments.lengths)

    def _eviction(self, b: int, n: int, far: int) -> Eviction:
        closings, raw = self.closings(0, b), int(self.raw[b])
        first, last = np.searchsorted(closings.ends, [raw, far], side="right").tolist()
        starts = closings.starts(first, last)
        query = max(int(self.observed.begin[b]), n - self.spec.observe)
        return Eviction(
            b,
            np.stack([starts, closings.ends[first:last] - starts]),
            self.budget(far),
            self._rows(self.map, b, raw, n),
            self._rows(self.observed, b, query, n),
        )

    def _rows(self, map: RowMap, b: int, begin: int, end: int) -> Tensor:
        return self.tensor(map.row_of_first[b] + np.arange(begin, end))

    def _is_repacked(self) -> bool:
        return len(self.evicted) > 0

    def _reads(
        self, sequence: Integers, position: Integers, counts: Integers
    ) -> tuple[Integers, Integers]:
        return np.zeros((1, len(position)), np.int64), self.raw[sequence][None]
