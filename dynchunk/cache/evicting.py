"""Eviction of whole chunks: when it happens, and how a layer reads what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import Evict
from dynchunk.cache.closings import Integers
from dynchunk.cache.kept import ChunkList, Kept
from dynchunk.cache.layer import LayerCache, Stored, row_nbytes
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.rows import FEW, Move, RowMap, Rows
from dynchunk.cache.segments import Segments
from dynchunk.ops.attend import attend
from dynchunk.ops.layout import Reads


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


class EvictingLayer(LayerCache):
    """A layer with raw tokens, and what each KV head has kept of those before them.

    Attributes
    ----------
    observed : Rows
        Queries that the next eviction needs.
    kept : Kept or None
        None before the first eviction.
    """

    _layout: EvictingLayout

    def __init__(self, layout: EvictingLayout, slot: int, rows: Rows | None = None) -> None:
        super().__init__(layout, slot, rows)
        self.observed = Rows()
        self.kept: Kept | None = None

    @property
    def buffers(self) -> dict[str, Rows]:
        """Raw rows and queries."""
        return {"rows": self.rows, "observed": self.observed}

    def tensors(self) -> Iterator[Tensor]:
        """Yield everything that takes memory on the device."""
        yield from super().tensors()
        if self.kept is not None:
            yield from self.kept.rows.values()
            yield self.kept.table.tensor(self._layout.device)

    @property
    def bookkeeping(self) -> int:
        """Bytes of what is the layer's alone and not on the device."""
        return 0 if self.kept is None else self.kept.nbytes

    @property
    def logical_nbytes(self) -> int:
        """Bytes of what is kept and of the rows in use, those of a shared page each time."""
        if self.kept is None:
            return super().logical_nbytes
        tokens = int(self.kept.counts(self._layout.device).sum())
        row = sum(row_nbytes(x[0]) for x in self.kept.rows.values() if len(x))
        return super().logical_nbytes + tokens * row

    def physical_length(self, b: int) -> int:
        """Return how many rows the KV head holds that holds most."""
        kept = 0 if self.kept is None else int(self.kept.counts(self._layout.device)[:, b].max())
        return super().physical_length(b) + kept

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order, as the layout has not yet."""
        super().select(index)
        if self.kept is not None:
            self.kept.select(index)

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b, as the layout has."""
        if self.kept is not None and n == 0:
            self.kept.clear(b)

    def give_back(self) -> None:
        """Return unused memory that is the layer's alone."""
        if self.kept is not None:
            self.kept.table.pool.shrink()

    def fork(self, layout: StreamLayout) -> EvictingLayer:
        """Return the same state on its own, with the same pages."""
        other = super().fork(layout)
        other.observed = self.observed.copy()
        other.kept = None if self.kept is None else self.kept.fork()
        return other

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Yield what has to hold of what is kept."""
        layout, kept = self._layout, self.kept
        if kept is None:
            yield "nothing is evicted", not layout.raw.any()
            return
        yield "the table on the device is the one on the host", kept.table.is_synced(layout.device)
        for g, of_head in enumerate(kept.chunks):
            for b, (starts, lengths) in enumerate(of_head):
                closings, far = layout.closings(0, b), int(layout.raw[b])
                ends, first = starts + lengths, starts < layout.spec.first
                yield "pages for all kept tokens", kept.table.fits(g, b, kept.count(g, b))
                yield (
                    "kept chunks are whole ones",
                    bool(np.isin(ends, closings.ends).all() and (ends <= far).all()),
                )
                yield "kept chunks are in order", bool((ends[:-1] <= starts[1:]).all())
                budget = max(layout.budget(far), int(lengths[first].sum()))
                yield "no head keeps more than its budget", kept.count(g, b) <= budget
                all_starts = np.concatenate([[0], closings.ends])
                protected = all_starts[all_starts < min(layout.spec.first, far)]
                yield "first chunks are kept", np.array_equal(starts[first], protected)

    def state(self) -> dict[str, Tensor]:
        """Return what a file has to hold beside raw rows: queries, and what is kept."""
        rows = self._layout.tensor(self._layout.observed.rows())
        state = {f"observed.{name}": x[rows] for name, x in self.observed.items()}
        kept = {} if self.kept is None else self.kept.state()
        return state | {f"kept.{name}": x for name, x in kept.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned, when the layout is there."""
        parts = [name.partition(".") for name in state]
        own = {
            kind: {name: state[f"{kind}.{name}"] for k, _, name in parts if k == kind}
            for kind in ("observed", "kept")
        }
        self.observed.place(self._layout.observed, own["observed"])
        if own["kept"]:
            self._make_kept(len(own["kept"]["counts"])).restore(own["kept"])

    def _make_kept(self, kv_heads: int) -> Kept:
        if self.kept is None:
            page_size = self._layout.table.pool.page_size
            self.kept = Kept(kv_heads, self._layout.batch, page_size)
        return self.kept

    def _before(self, q: Tensor, k: Tensor, sink: Tensor | None, scale: float | None) -> None:
        """Evict what is due, and remember the queries."""
        layout = self._layout
        assert layout.move is not None
        for one in layout.evicted:
            self._make_kept(k.shape[1]).evict(
                one.sequence,
                one.chunks,
                {name: x[one.raw] for name, x in self.rows.items()},
                self.observed["q"][one.queries],
                one.budget,
                layout.spec,
                sink,
                scale,
            )
        self.observed.extend(layout.move, {"q": q})

    def _stored(self, k: Tensor, v: Tensor | None) -> Stored:
        if self.kept is None:
            return super()._stored(k, v)
        step, kept = self.step, self.kept
        return Stored(
            kept.rows["k"],
            kept.rows.get("v"),
            None,
            kept.table.tensor(k.device),
            kept.counts(k.device)[:, step.sequence],
            step.raw_begin.expand(k.shape[1], -1).contiguous(),
        )

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        indices: Tensor | None,
        sink: Tensor | None,
        scale: float | None,
        impl: str | None,
    ) -> Tensor:
        if self.kept is None:
            return super()._prefill(q, k, v, indices, sink, scale, impl)
        stored, kept = self._stored(k, v), self.kept
        rows = [
            torch.cat([kept.where(g, b) for b in range(self._layout.batch)]).to(k.device)
            for g in range(k.shape[1])
        ]
        entry_k, entry_v = (
            None if x is None else [x.flatten(0, 1)[of_head] for of_head in rows]
            for x in (stored.k, stored.v)
        )
        assert entry_k is not None
        counts = kept.counts(k.device)
        ends = counts.flatten().cumsum(0).view_as(counts)
        first = ends[:, :1] - counts[:, :1]
        plain, _ = self._layout.reads()
        reads = Reads(
            plain.cu_seqlens_q,
            plain.cu_seqlens_k,
            torch.cat([first, ends], 1),
            ends.new_zeros(int(counts.sum())),
            stored.n_visible,
            stored.raw_begin,
        )
        operands = (q, k, v, entry_k, entry_v, reads)
        return attend(*operands, sink=sink, scale=scale, impl=impl).out
