"""Attention over chunks for the next tokens of sequences whose past is in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.attention.functional import slope_entries, slope_keys, slope_queries
from dynchunk.attention.indexer import Choosing
from dynchunk.attention.policy import Policy
from dynchunk.attention.rope import Rotation, rotate
from dynchunk.attention.scoring import Segmenter
from dynchunk.ops.layout import Spans


class Closed(Protocol):
    """Chunks that new tokens closed."""

    @property
    def spans(self) -> tuple[Spans, ...]:
        """The rows that each entry pools, per view."""

    @property
    def position(self) -> tuple[Tensor, ...]:
        """First token of each chunk, int64 [N_g] per view."""


class Step(Protocol):
    """New tokens of all sequences."""

    @property
    def position(self) -> Tensor:
        """Tokens before each in its sequence, int64 [S]."""

    @property
    def closed(self) -> Closed | None:
        """What they closed."""


class LayerState(Protocol):
    """What a layer needs of a cache: :class:`dynchunk.cache.LayerCache` has it."""

    @property
    def policy(self) -> Policy:
        """The policy that the state is for."""

    @property
    def step(self) -> Step:
        """The new tokens."""

    def extend(self, **rows: Tensor | None) -> dict[str, Tensor] | None:
        """Store raw rows; return those that entries pool."""

    def close(
        self, k: list[Tensor], v: list[Tensor] | None = None, index: list[Tensor] | None = None
    ) -> None:
        """Store entries."""

    def choose(self, q: Tensor, weights: Tensor, topk: int) -> Tensor:
        """Return the entries with the highest index scores."""

    def attend(
        self,
        q: Tensor,
        *,
        indices: Tensor | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        impl: str | None = None,
    ) -> Tensor:
        """Attend to entries and raw rows."""


class ModelState(Protocol):
    """What a model needs of a cache: :class:`dynchunk.cache.Cache` has it."""

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policy of each layer."""

    @property
    def leaders(self) -> tuple[int, ...]:
        """The layer whose boundaries each layer uses."""

    @property
    def layers(self) -> tuple[LayerState, ...]:
        """The state of each layer."""

    def begin(self, cu_seqlens: Tensor) -> None:
        """Announce new tokens of all sequences."""

    def segment(
        self,
        leader: int,
        segmenter: Segmenter,
        tokens: Tensor,
        hidden: Tensor,
        scores: Tensor | None,
    ) -> None:
        """Cut the new tokens into chunks, for a layer and those that follow it."""


#: Keys before RoPE and values of entries, per view.
Entries = tuple[list[Tensor], list[Tensor] | None]

#: Makes them from the rows that chunks pool.
MakeEntries = Callable[[dict[str, Tensor], tuple[Spans, ...]], Entries]


def attend_streaming(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    x: Tensor,
    index_query: Tensor,
    cache: LayerState,
    policy: Policy,
    entries: MakeEntries,
    *,
    inputs: dict[str, Tensor],
    indexer: Choosing | None = None,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend to what came before and to the new tokens themselves, and remember them.

    Parameters
    ----------
    q : floating tensor [S, H, D]
        Packed queries of the new tokens, before RoPE.
    k : floating tensor [S, H_kv, D]
        Before RoPE.
    v : floating tensor [S, H_kv, D_v], or None
    x : floating tensor [S, dim]
        Hidden states of the new tokens.
    index_query : floating tensor [S, query_dim]
        What the indexer's queries are projected from.
    cache : LayerState
    policy : Policy
    entries : function
        Makes entries from the rows of ``inputs`` and ``v`` that they pool.
    inputs : dict of tensors [S, ...]
        What that reads of the new tokens, by name.
    indexer, sink, slopes, impl
        As in :func:`~dynchunk.attention.functional.attend_entries`.

    Returns
    -------
    tensor [S, H, D_v]
    """
    if cache.policy != policy:
        require(False, "cache", f"one for {policy}", cache.policy)
    new = len(cache.step.position)
    require(len(x) == new, "x", f"hidden states of the {new} tokens appended", x)
    position, width, dtype, rope = cache.step.position, q.shape[-1], q.dtype, policy.rope
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = width**-0.5
    rotation = Rotation.of(position, rope, width, dtype)
    q, k = rotation.turn(q), rotation.turn(k)
    if slopes is not None:
        q = slope_queries(q.to(wide), slopes / scale, position)
        k = slope_keys(k.to(wide), position)
    pooled, closed = cache.extend(k=k, v=v, **inputs), cache.step.closed
    if pooled is not None and closed is not None:
        entry_k, entry_v = entries(pooled, closed.spans)
        at = zip(entry_k, closed.position, strict=True)
        entry_k = [rotate(entry, starts, rope) for entry, starts in at]
        if slopes is not None:
            entry_k = [slope_entries(entry.to(wide)) for entry in entry_k]
        keys = None
        if indexer is not None:
            keys = indexer.keys(pooled["x"], closed.spans, closed.position)
        cache.close(entry_k, entry_v, keys)
    indices = None
    if indexer is not None:
        indices = cache.choose(*indexer.queries(x, index_query, position), indexer.topk.k)
    out = cache.attend(q, indices=indices, sink=sink, scale=scale, impl=impl).to(dtype)
    return out if v is not None else rotation.turn_back(out[..., :width])
