"""Selection of raw chunks: a layer of which each query head reads the best chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dynchunk.attention.specs import Quest
from dynchunk.cache.layer import LayerCache, row_nbytes
from dynchunk.cache.layout import Step
from dynchunk.cache.rows import FEW, Rows
from dynchunk.cache.selecting import Far, SelectingLayout
from dynchunk.ops.budget import best_within
from dynchunk.ops.decode import decode
from dynchunk.selection.quest import chunk_bounds, quest_scores


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
        """Decode some of the queries, with a list for each query head.

        ``decode`` has a list for each KV head: the query heads that share one are laid out as so
        many queries.
        """
        far, q = self._layout.far(rows), q[rows]
        self._scored = sum(len(one.bounds) for one in far if one.budget)
        stored, kv_heads = self._stored(k, v), k.shape[1]
        n_visible, nothing = stored.n_visible[:, rows], stored.n_visible.new_zeros(len(rows))
        boxes = (self.bounds[name].flatten(0, 1) for name in ("low", "high") if self.bounds)
        lists = choose_tokens(q, far, tuple(boxes), self._layout.spec, scale)
        group = q.shape[1] // kv_heads
        lists = lists.reshape(len(q), kv_heads, group, lists.shape[2])
        stored = stored._replace(n_visible=n_visible, raw_begin=nothing[None])
        self._last = (stored, nothing, lists)
        found = decode(
            q.reshape(len(q), kv_heads, group, q.shape[2]).transpose(1, 2).flatten(0, 1),
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
        shape = (len(q), group, kv_heads)
        out = found.out.reshape(*shape, found.out.shape[2]).transpose(1, 2).flatten(1, 2)
        if sink is None:
            return out
        lse = found.lse.reshape(shape).transpose(1, 2).flatten(1)
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
    width = max((one.budget + len(one.always) for one in far), default=0)
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
