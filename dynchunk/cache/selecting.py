"""Selection of raw chunks: the bounds of their keys, and which tokens each query head reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import Quest
from dynchunk.cache.closings import Integers
from dynchunk.cache.layer import LayerCache, row_nbytes
from dynchunk.cache.layout import Step, StreamLayout
from dynchunk.cache.pages import PagePool, PageTable
from dynchunk.cache.rows import FEW, Rows
from dynchunk.cache.segments import Segments
from dynchunk.ops.budget import best_within
from dynchunk.ops.decode import decode
from dynchunk.selection.quest import chunk_bounds, quest_scores


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


class SelectingLayer(LayerCache):
    """A layer that keeps all tokens, of which each query head reads the best chunks."""

    _layout: SelectingLayout

    def __init__(self, layout: SelectingLayout, slot: int, rows: Rows | None = None) -> None:
        super().__init__(layout, slot, rows)
        self._scored = 0  # bounds that the last step of a few tokens read

    @property
    def bounds(self) -> dict[str, Tensor]:
        """Pages [P, page_size, H_kv, D] of the elementwise least and largest keys of chunks."""
        return self._layout.bounds.pool.layers[self._slot]

    def tensors(self) -> Iterator[Tensor]:
        """Yield everything that takes memory on the device."""
        yield from super().tensors()
        yield from self.bounds.values()

    @property
    def logical_nbytes(self) -> int:
        """Bytes of the tokens and bounds in use, those of a shared page each time."""
        layout = self._layout
        chunks = sum(len(layout.closings(0, b)) for b in range(layout.batch))
        bounds = sum(row_nbytes(x[0]) for x in self.bounds.values() if len(x))
        return super().logical_nbytes + chunks * bounds

    @property
    def read_nbytes(self) -> int:
        """Bytes of rows and of bounds that the last step of a few tokens read."""
        bounds = sum(row_nbytes(x[0]) for x in self.bounds.values() if len(x))
        return super().read_nbytes + self._scored * bounds

    def state(self) -> dict[str, Tensor]:
        """Return the bounds, which a file has to hold beside the tokens."""
        rows = self._layout.bound_rows()
        return {name: x.flatten(0, 1)[rows] for name, x in self.bounds.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        self._write_bounds(self._layout.bound_rows(), state)

    def _write_bounds(self, to: Tensor, bounds: dict[str, Tensor]) -> None:
        for name, x in bounds.items():
            self._layout.bounds.pool.write(self._slot, name, to, x)

    def _extend_full(self, step: Step, rows: dict[str, Tensor]) -> None:
        super()._extend_full(step, rows)
        closed = self._layout.closed
        if closed is not None:
            k = self.entries["k"].flatten(0, 1)[closed.tokens]
            low, high = chunk_bounds(k, closed.lengths)
            self._write_bounds(closed.to, {"low": low, "high": high})

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
        """Attend to all tokens, but for sequences that have only a few new ones in this step."""
        out = super()._prefill(q, k, v, indices, sink, scale, impl)
        few = self.step.cu_seqlens.diff() <= FEW
        rows = few[self.step.sequence].nonzero()[:, 0]
        if len(rows):
            out[rows] = self._select(q, k, v, rows.tolist(), sink, scale, impl)
        return out

    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        indices: Tensor | None,
        sink: Tensor | None,
        scale: float | None,
        impl: str | None,
    ) -> Tensor:
        return self._select(q, k, v, list(range(len(q))), sink, scale, impl)

    def _select(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        rows: list[int],
        sink: Tensor | None,
        scale: float | None,
        impl: str | None,
    ) -> Tensor:
        """Decode some of the queries, a list for each query head: a group is as many queries."""
        far, q = self._layout.far(rows), q[rows]
        self._scored = sum(len(one.bounds) for one in far if one.budget)
        stored, kv_heads = self._stored(k, v), k.shape[1]
        n_visible, nothing = stored.n_visible[:, rows], stored.n_visible.new_zeros(len(rows))
        boxes = (self.bounds[name].flatten(0, 1) for name in ("low", "high") if self.bounds)
        lists = choose_tokens(q, far, tuple(boxes), self._layout.spec, scale)
        lists = lists.reshape(len(q), kv_heads, -1, lists.shape[2])  # [S, H_kv, H / H_kv, K]
        stored = stored._replace(n_visible=n_visible, raw_begin=nothing[None])
        self._last = (stored, nothing, lists)
        group = lists.shape[2]
        found = decode(
            q.reshape(len(q), kv_heads, group, -1).transpose(1, 2).flatten(0, 1),
            k,
            v,
            stored.k,
            stored.v,
            stored.pages,
            self.step.sequence[rows].repeat_interleave(group),
            n_visible.repeat_interleave(group, 1),
            nothing[None].repeat_interleave(group, 1),
            nothing.repeat_interleave(group),
            indices=lists.transpose(1, 2).flatten(0, 1),
            scale=scale,
            impl=impl,
        )
        out = found.out.reshape(len(q), group, kv_heads, -1).transpose(1, 2).flatten(1, 2)
        if sink is None:
            return out
        lse = found.lse.reshape(len(q), group, kv_heads).transpose(1, 2).flatten(1)
        of_rows = torch.sigmoid(lse - sink.to(lse.dtype))[..., None]
        return (out * of_rows).to(q.dtype)


def choose_tokens(
    q: Tensor, far: list[Far], boxes: tuple[Tensor, ...], spec: Quest, scale: float | None
) -> Tensor:
    """Return the tokens that each query head reads.

    Parameters
    ----------
    q : floating tensor [S, H, D]
    far : list of S
    boxes : two floating tensors [R, H_kv, D]
        Rows of the bounds' pages, least and largest keys; nothing where no chunk is far.
    spec : Quest
    scale : float or None

    Returns
    -------
    int64 tensor [S, H, K]
        Numbers of tokens in their sequence, -1 for none.
    """
    width = max(one.budget + len(one.always) for one in far)
    lists = q.new_full((*q.shape[:2], width), -1, dtype=torch.int64)
    for row, query, one in zip(lists, q, far, strict=True):
        row[:, one.budget : one.budget + len(one.always)] = one.always
        if one.budget:
            low, high = (x[one.bounds] for x in boxes)
            scores = quest_scores(query, low, high, normalise=spec.normalise, scale=scale)
            row[:, : one.budget] = _tokens(scores, one)
    return lists


def _tokens(scores: Tensor, far: Far) -> Tensor:
    """Return the tokens of the best chunks [H, budget], -1 behind the last."""
    order, total = best_within(scores, far.costs, far.budget)
    slots = torch.arange(far.budget, device=scores.device).expand(len(scores), -1).contiguous()
    at = torch.searchsorted(total, slots, right=True)  # which of the ordered chunks a slot is in
    chunk, end = order.gather(1, at), total.gather(1, at)
    tokens = far.starts[chunk] + slots - (end - far.costs[chunk])
    return torch.where(end <= far.budget, tokens, -1)
