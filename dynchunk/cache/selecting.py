"""Selection of raw chunks: all tokens in pages, and which of them a query may read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import Quest
from dynchunk.cache.closings import Integers
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.pages import PagePool, PageTable
from dynchunk.cache.segments import Segments


class Closed(NamedTuple):
    """Chunks that new tokens closed."""

    tokens: Tensor  #: int64, rows of the token pages, chunk after chunk
    lengths: Tensor  #: int64 [N]
    to: Tensor  #: int64 [N], rows of the bounds' pages


class Far(NamedTuple):
    """What one query may read: N chunks before its window, of which it reads some."""

    bounds: Tensor  #: int64 [N], rows of the bounds' pages
    starts: Tensor  #: int64 [N], first token of each, after those that are always read
    costs: Tensor  #: int64 [N], tokens from there on
    budget: int  #: tokens of them that a query head reads
    always: Tensor  #: int64, the first tokens, and those from the end of the far chunks on


class SelectingLayout(StreamLayout):
    """All tokens in pages, as full attention has them; in others the bounds of closed chunks."""

    def __init__(
        self, policy: Policy, segments: Segments, layers: int, page_size: int, device: torch.device
    ) -> None:
        super().__init__(policy, segments, layers, page_size, device)
        assert isinstance(policy.selection, Quest)
        self.spec = policy.selection
        self.bounds = PageTable.empty(PagePool(page_size, layers), 1, self.batch)
        self.closed: Closed | None = None
        self._far: dict[int, Far] = {}

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """Pages of tokens, and of bounds."""
        return self.table, self.bounds

    def append(self, counts: Integers, floor: Integers) -> None:
        """Follow the segments, and find the chunks that have to be bounded."""
        super().append(counts, floor)
        self.closed, self._far = self._closed_chunks(counts), {}

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b, as the segments have."""
        super().truncate(b, n)
        self.bounds.truncate(0, b, len(self.closings(0, b)))

    def fork(self, segments: Segments) -> SelectingLayout:
        """Return the same state on its own, with the same pages."""
        other = super().fork(segments)
        other.bounds = self.bounds.fork()
        return other

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Yield that every closed chunk has its place for bounds."""
        for b in range(self.batch):
            yield "pages for all bounds", self.bounds.fits(0, b, len(self.closings(0, b)))

    def restore(self, state: dict[str, Integers]) -> None:
        """Make room for the bounds of all closed chunks."""
        for b in range(self.batch):
            self.bounds.extend(0, b, 0, len(self.closings(0, b)))

    def bound_rows(self) -> Tensor:
        """Return where the bounds of all closed chunks are."""
        rows = [self.bounds.rows(0, b, 0, len(self.closings(0, b))) for b in range(self.batch)]
        return self.tensor(np.concatenate([np.zeros(0, np.int64), *rows]))

    def far(self, rows: list[int]) -> list[Far]:
        """Return what some of the new tokens may read of the chunks before their windows."""
        assert self.step is not None
        if rows and rows[0] not in self._far:  # the first layer of the step
            sequence, position = self.step.sequence.tolist(), self.step.position.tolist()
            self._far = {i: self._derive_far(sequence[i], position[i]) for i in rows}
        return [self._far[i] for i in rows]

    def _derive_far(self, b: int, token: int) -> Far:
        closings = self.closings(0, b)
        chunks, end = self.covered(b, token, token + 1)
        first = min(self.spec.first, end)
        starts = np.maximum(closings.starts(0, chunks), first)
        costs = np.maximum(closings.ends[:chunks], first) - starts
        always = np.concatenate([np.arange(first), np.arange(end, token + 1)])
        return Far(
            self.tensor(self.bounds.rows(0, b, 0, chunks)),
            self.tensor(starts),
            self.tensor(costs),
            self.spec.budget(end - first),
            self.tensor(always),
        )

    def _closed_chunks(self, counts: Integers) -> Closed | None:
        found = []
        for b, n in enumerate(self.segments.lengths.tolist()):
            closings = self.closings(0, b)
            old, new = closings.count(n - int(counts[b])), len(closings)
            self.bounds.extend(0, b, old, new)
            begin, end = closings.start(old), closings.start(new)
            lengths = closings.ends[old:new] - closings.starts(old, new)
            to = self.bounds.rows(0, b, old, new)
            found.append((self.table.rows(0, b, begin, end), lengths, to))
        joined = [np.concatenate(x) for x in zip(*found, strict=True)]
        return Closed(*map(self.tensor, joined)) if joined and len(joined[2]) else None
