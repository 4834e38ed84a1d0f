"""What one attention layer keeps: raw rows, entries and index keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import All, MeanPool, Quest
from dynchunk.cache.closings import Integers
from dynchunk.cache.layout import Step, StreamLayout
from dynchunk.cache.rows import Rows
from dynchunk.ops.attend import attend
from dynchunk.ops.attend_selected import attend_selected
from dynchunk.ops.decode import decode
from dynchunk.ops.decode_topk import decode_topk
from dynchunk.ops.index_topk import index_topk
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool


class Stored(NamedTuple):
    """Pages, and what each query reads in each of G views: as ``decode`` takes it."""

    k: Tensor  #: [P, page_size, H_kv / G, D]
    v: Tensor | None
    bias: Tensor | None
    pages: Tensor  #: [G, B, n_pages]
    n_visible: Tensor  #: [G, S]
    raw_begin: Tensor  #: [G, S]


class LayerCache:
    """The state of one layer, which its module fills and reads; a :class:`Cache` makes them.

    For every part of the sequences, a module calls :meth:`extend`, then :meth:`close` if that
    returned rows to pool, then :meth:`attend`. Keys come with their positions in them (RoPE), so
    that nothing that is stored changes later.
    """

    def __init__(self, layout: StreamLayout, slot: int, rows: Rows | None = None) -> None:
        self._layout, self._slot = layout, slot
        self.rows = Rows() if rows is None else rows
        self._last: tuple[Stored, Tensor, Tensor | None] | None = None  # read, by a few tokens
        self._read: dict[str, Tensor] = {}
        self._done: Step | None = None

    @property
    def policy(self) -> Policy:
        """The policy that the state is for."""
        return self._layout.policy

    @property
    def entries(self) -> dict[str, Tensor]:
        """Pages [P, page_size, ...] of what entries have, by name."""
        return self._layout.table.pool.layers[self._slot]

    @property
    def step(self) -> Step:
        """The new tokens that the layer has to attend for."""
        step = self._layout.step
        if step is None or step is self._done:
            raise RuntimeError("cache: there are no new tokens; append them to the Cache first")
        return step

    @property
    def is_whole(self) -> bool:
        """Whether the layer has had all tokens that were appended."""
        return self._layout.step is self._done or self._layout.step is None

    def extend(self, **rows: Tensor | None) -> dict[str, Tensor] | None:
        """Store the raw rows of the new tokens, and return those that entries have to pool.

        Parameters
        ----------
        **rows : tensors [S, ...]
            ``k`` and, unless keys are the values, ``v``: keys after RoPE, and values. Any other
            name: what entries are made from.

        Returns
        -------
        dict of tensors, or None
            The rows that ``step.closed.spans`` speak of; None where no chunk was closed.
        """
        step, given = self.step, {name: x for name, x in rows.items() if x is not None}
        for name, x in given.items():
            same = x.device.type == self._layout.device.type
            require(same, name, f"a tensor on {self._layout.device}, as the cache", x.device)
        if self.rows:
            require(set(given) == set(self.rows), "rows", f"{sorted(self.rows)}", sorted(given))
        if self._layout.is_full:
            self._extend_full(step, given)
            return None
        self._read = self.rows.extend(step.move, given)
        if step.closed is None:
            return None
        return {name: x[step.closed.rows] for name, x in self._read.items()}

    def close(
        self, k: list[Tensor], v: list[Tensor] | None = None, index: list[Tensor] | None = None
    ) -> None:
        """Store the entries of the chunks that were closed.

        Parameters
        ----------
        k : floating tensors [N_g, H_kv / G, D], one per view
            Keys after RoPE at the chunk's first token.
        v : floating tensors [N_g, H_kv / G, D_v], or None
            As the raw rows have it.
        index : floating tensors [N_g, D_I], or None
            Keys of the indexer after RoPE, if there is one.
        """
        closed, bias = self.step.closed, None
        assert closed is not None
        if closed.bias is not None:
            wide = torch.float64 if k[0].dtype == torch.float64 else torch.float32
            bias = [b.to(wide)[:, None].expand(-1, k[0].shape[1]) for b in closed.bias]
        for name, of_views in (("k", k), ("v", v), ("index", index), ("bias", bias)):
            if of_views is not None:
                self.write(name, closed.to, torch.cat(of_views))

    def choose(self, q: Tensor, weights: Tensor, topk: int) -> Tensor:
        """Return the entries with the highest index scores, int64 [S, G, topk], -1 for none.

        Parameters
        ----------
        q : floating tensor [S, H_I, D_I]
            Index queries after RoPE.
        weights : floating tensor [S, H_I]
        topk : int
        """
        step, table = self.step, self._layout.table
        keys = self.entries.get("index")
        if keys is None:
            keys = q.new_empty(1, table.pool.page_size, q.shape[2])  # a page that nobody reads
        found = []
        if step.is_prefill:
            reads, rows = self._layout.reads()
            for g, of_view in enumerate(rows):
                own = reads.view(g)
                found.append(index_topk(q, keys.flatten(0, 1)[of_view], weights, own, topk))
        else:
            pages = table.tensor(q.device)
            for g in range(len(self.policy.views)):
                own_pages, seen = pages[g : g + 1], step.n_visible[g : g + 1]
                found.append(decode_topk(q, keys, weights, own_pages, step.sequence, seen, topk))
        if len(found) == 1:  # no copy: for a long prompt these lists are the largest thing there is
            return found[0].indices[:, None]
        return torch.stack([best.indices for best in found], 1)

    def attend(
        self,
        q: Tensor,
        *,
        indices: Tensor | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        impl: str | None = None,
    ) -> Tensor:
        """Attend to entries and raw rows for the new tokens, after which the layer is done.

        Parameters
        ----------
        q : floating tensor [S, H, D]
            After RoPE.
        indices : int64 tensor [S, G, K], optional
            What :meth:`choose` returned.
        sink, scale, impl
            As in :func:`~dynchunk.ops.decode.decode`, which a few tokens use, and
            :func:`~dynchunk.ops.attend.attend`, which more than a few use.

        Returns
        -------
        tensor [S, H, D_v]
        """
        step, (k, v) = self.step, (self._read["k"], self._read.get("v"))
        if indices is not None and indices.shape[1] != k.shape[1]:
            indices = indices.repeat_interleave(k.shape[1] // indices.shape[1], 1)
        attend = self._prefill if step.is_prefill else self._decode
        out = attend(q, k, v, indices, sink, scale, impl)
        self.finish()
        return out

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sink: Tensor | None = None,
        scale: float | None = None,
        impl: str | None = None,
    ) -> Tensor:
        """Store new tokens and attend for them, where another model makes their projections.

        The policy has to need no weights: no chunks; ``MeanPool(own=False)``, whose entries are
        the means of the keys as they come and of the values; ``Raw`` with or without ``Quest``; or
        ``Evict``. And no ``rope``, for positions are in the keys already.

        Parameters
        ----------
        q : floating tensor [S, H, D]
            After RoPE, as ``k`` is.
        k : floating tensor [S, H_kv, D]
        v : floating tensor [S, H_kv, D_v]
        sink, scale, impl
            As in :meth:`attend`.

        Returns
        -------
        tensor [S, H, D_v]

        Examples
        --------
        >>> from dynchunk.attention import MeanPool
        >>> from dynchunk.boundaries import FixedStride
        >>> from dynchunk.cache import Cache
        >>> cache = Cache(Policy(FixedStride(4), reduction=MeanPool(), window=8, rope=None))
        >>> cache.append(10)
        >>> x = torch.randn(10, 2, 8)
        >>> cache.layers[0].mix(x, x, x).shape
        torch.Size([10, 2, 8])
        """
        self._take(q, k, v, sink, scale)
        return self.attend(q, sink=sink, scale=scale, impl=impl)

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sink: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Store new tokens as :meth:`mix` does, where nobody needs what their queries get.

        A prompt that was computed elsewhere, say: what an eviction later leaves of it is the same.
        """
        self._take(q, k, v, sink, scale)
        self.finish()

    def _take(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float | None
    ) -> None:
        require_weightless(self.policy)
        views = len(self.policy.views)
        require(k.shape[1] % views == 0, "k", f"a multiple of {views} KV heads, one per view", k)
        self._before(q, k, sink, scale)
        pooled = self.extend(k=k, v=v)
        if pooled is not None:
            closed = self.step.closed
            assert closed is not None
            self.close(*(_means(pooled[name], closed.spans) for name in ("k", "v")))

    def finish(self) -> None:
        """Be done with the new tokens: after :meth:`attend`, or for keys without queries."""
        self._read, self._done = {}, self.step

    def write(self, name: str, to: Tensor, entries: Tensor) -> None:
        """Store what entries [N, ...] have under a name, in rows of the pages."""
        self._layout.table.pool.write(self._slot, name, to, entries)

    @property
    def buffers(self) -> dict[str, Rows]:
        """All buffers of rows, by the name that their maps have in the layout."""
        return {"rows": self.rows}

    def tensors(self) -> Iterator[Tensor]:
        """Yield everything that takes memory on the device."""
        for rows in self.buffers.values():
            yield from rows.values()
        yield from self.entries.values()

    @property
    def logical_nbytes(self) -> int:
        """Bytes of the entries and rows in use, those of a shared page each time."""
        layout, total = self._layout, 0
        views = range(len(self.policy.views))
        for name, rows in self.buffers.items():
            held = int((layout.maps[name].end - layout.maps[name].begin).sum())
            total += held * sum(map(row_nbytes, rows.values()))
        entries = sum(layout.entries(g, b) for g in views for b in range(layout.batch))
        return total + entries * sum(row_nbytes(x[0]) for x in self.entries.values() if len(x))

    @property
    def bookkeeping(self) -> int:
        """Bytes of what is the layer's alone and not on the device."""
        return 0

    @property
    def read_nbytes(self) -> int:
        """Bytes that the last step of a few tokens read, each row once per KV head; 0 before it."""
        if self._last is None:
            return 0
        stored, raw_end, lists = self._last
        k, v = stored.k, stored.k[..., :0] if stored.v is None else stored.v
        row = (k.shape[3] + v.shape[3]) * k.element_size()
        row += 0 if stored.bias is None else stored.bias.element_size()
        raw = (raw_end - stored.raw_begin).clamp(min=0).sum() * k.shape[2]
        if lists is not None:
            return row * (rows_read(lists) + int(raw))
        return row * int(stored.n_visible.sum() * k.shape[2] + raw)

    def physical_length(self, b: int) -> int:
        """Return how many entries of all views and raw rows a sequence has."""
        layout = self._layout
        entries = sum(layout.entries(g, b) for g in range(len(self.policy.views)))
        return entries + int(layout.map.end[b] - layout.map.begin[b])

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order, as the layout has not yet."""
        for name, rows in self.buffers.items():
            rows.select(index, self._layout.maps[name])

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b, as the layout has."""

    def give_back(self) -> None:
        """Return unused memory that is the layer's alone."""

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Yield what has to hold of this kind of layer, and whether it does."""
        yield from ()

    def state(self) -> dict[str, Tensor]:
        """Return what a file has to hold beside raw rows and entries."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned, when the layout is there."""

    def fork(self, layout: StreamLayout) -> Self:
        """Return the same state on its own, of a layout that holds the same pages."""
        return type(self)(layout, self._slot, self.rows.copy())

    def _before(self, q: Tensor, k: Tensor, sink: Tensor | None, scale: float | None) -> None:
        """Do what a policy has to, before new tokens are stored."""

    def _extend_full(self, step: Step, rows: dict[str, Tensor]) -> None:
        Rows(self.rows).check(rows, len(step.position))
        self._read = rows
        if step.closed is not None:
            for name, x in rows.items():
                self.write(name, step.closed.to, x)

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
        step, stored = self.step, self._stored(k, v)
        self._last = (stored, step.raw_end, indices)
        return decode(
            q,
            k,
            v,
            stored.k,
            stored.v,
            stored.pages,
            step.sequence,
            stored.n_visible,
            stored.raw_begin,
            step.raw_end,
            indices=indices,
            bias=stored.bias,
            sink=sink,
            scale=scale,
            impl=impl,
        ).out

    def _stored(self, k: Tensor, v: Tensor | None) -> Stored:
        """Return what :meth:`_decode` reads beside raw rows."""
        pages, step = self._layout.table.tensor(k.device), self.step
        return Stored(*self._pages(k, v), pages, step.n_visible, step.raw_begin)

    def _pages(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the pages of keys, values and bias; one that nobody reads where there is none."""
        if "k" in self.entries:
            return self.entries["k"], self.entries.get("v"), self.entries.get("bias")
        size = (1, self._layout.table.pool.page_size, k.shape[1] // len(self.policy.views))
        of_v = None if v is None else v.new_empty(*size, v.shape[2])
        return k.new_empty(*size, k.shape[2]), of_v, None

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
        reads, rows = self._layout.reads()
        entry_k, entry_v, bias = (
            None if pages is None else [pages.flatten(0, 1)[of_view] for of_view in rows]
            for pages in self._pages(k, v)
        )
        assert entry_k is not None
        if indices is None:
            operands = (q, k, v, entry_k, entry_v, reads)
            return attend(*operands, bias=bias, sink=sink, scale=scale, impl=impl).out
        selected = (q, k, v, entry_k, entry_v, indices, reads)
        return attend_selected(*selected, bias=bias, sink=sink, scale=scale, impl=impl).out


def require_weightless(policy: Policy) -> None:
    """Raise unless :meth:`LayerCache.mix` can make a policy's entries and choose among them."""
    reduction = policy.reduction
    is_mean = isinstance(reduction, MeanPool) and not reduction.own and not reduction.norm
    weightless = policy.boundaries is None or is_mean or policy.keeps_raw_chunks
    expected = "MeanPool(own=False, norm=False), Raw or Evict, which have no weights"
    require(weightless, "policy: reduction", expected, reduction)
    weightless = isinstance(policy.selection, All | Quest)
    expected = "All() or Quest(): the indexer of TopK has weights"
    require(weightless, "policy: selection", expected, policy.selection)
    expected = "None: keys come with their positions in them"
    require(policy.rope is None, "policy: rope", expected, policy.rope)


def row_nbytes(x: Tensor) -> int:
    """Return the bytes of a row of x [rows, ...]."""
    return x[:1].numel() * x.element_size() if len(x) else 0


def rows_read(lists: Tensor) -> int:
    """Count the rows that lists [S, H_kv, K, ..] name for each query and KV head, each once."""
    rows = lists.flatten(2).sort(-1).values
    repeated = rows[..., 1:] == rows[..., :-1]
    return int((rows >= 0).sum() - (repeated & (rows[..., 1:] >= 0)).sum())


def _means(x: Tensor, spans: tuple[Spans, ...]) -> list[Tensor]:
    """Return the mean of each chunk's rows, each view of its heads."""
    heads = x.shape[1] // len(spans)
    return [pool(x[:, g * heads : (g + 1) * heads], of_view) for g, of_view in enumerate(spans)]
