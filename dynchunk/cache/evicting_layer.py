"""Eviction of whole chunks: a layer with raw rows, and what each KV head has kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dynchunk.cache.closings import Integers
from dynchunk.cache.evicting import EvictingLayout
from dynchunk.cache.kept import Kept
from dynchunk.cache.layer import LayerCache, Stored, row_nbytes
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.rows import Rows
from dynchunk.ops.attend import attend
from dynchunk.ops.layout import Reads


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
