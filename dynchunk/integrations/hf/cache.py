"""A transformers cache whose layers hold entries: one :class:`dynchunk.cache.Cache` inside."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from dynchunk._checks import require, require_int
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter
from dynchunk.boundaries import BoundaryRule
from dynchunk.boundaries.scores.base import Score
from dynchunk.cache import Cache, LayerCache
from dynchunk.cache.cache import ROLLBACK
from dynchunk.integrations.hf.ragged import Mask, Ragged
from dynchunk.integrations.hf.scores import given_scores

_PADDING = -1


class ChunkedCache(TransformersCache):
    """What ``generate`` and a wrapped model pass around.

    It tells two lengths apart: the *logical* one, columns of the batch that were seen, from which
    transformers derives positions and masks (:meth:`get_seq_length`); and the *physical* one, the
    rows that are really held (``state.physical_lengths(layer)``). Padding is a column, and never
    reaches a row.

    Parameters
    ----------
    policies : sequence of Policy or None
        One per layer of the model. None: the layer is left as it is, and has the cache that
        transformers gives it.
    config : transformers config, optional
        Of the decoder, where a policy is None.
    score : Score, optional
        What scores the ids of the tokens, for policies with a ``BoundaryRule`` and no score of
        their own: a :class:`~dynchunk.boundaries.DelimiterScore`, say. Its receptive field has to
        be bounded.
    segmenters : mapping from leading layer to Segmenter, optional
        Scorers with weights, of policies that have a learned score.
    rollback : int >= 0 or None
        How many tokens :meth:`crop` can take back: as in :class:`dynchunk.cache.Cache`.
    page_size : int

    Attributes
    ----------
    state : dynchunk.cache.Cache or None
        What the layers with a policy hold, from the first tokens on.

    Examples
    --------
    >>> from dynchunk.attention import full
    >>> cache = ChunkedCache([full(rope=None)])
    >>> cache.begin(Ragged.of((2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])))
    >>> x = torch.randn(5, 1, 8)
    >>> out = cache.layer(0).mix(x, x, x)
    >>> cache.end()
    >>> cache.get_seq_length(), cache.state.lengths
    (3, (2, 3))
    """

    def __init__(
        self,
        policies: Sequence[Policy | None],
        *,
        config: Any = None,
        score: Score | None = None,
        segmenters: Mapping[int, Segmenter] | None = None,
        rollback: int | None = ROLLBACK,
        page_size: int = 64,
    ) -> None:
        self.policies = tuple(policies)
        own = [policy for policy in self.policies if policy is not None]
        require(len(own) > 0, "policies", "a policy for at least one layer", policies)
        native = _native_layers(config) if len(own) < len(self.policies) else {}
        layers: list[Any] = [
            native[i] if policy is None else ChunkedLayer(self)
            for i, policy in enumerate(self.policies)
        ]
        super().__init__(layers=layers)
        self.score, self.rollback = score, rollback
        self.page_size = require_int("page_size", page_size, 1)
        self.state: Cache | None = None
        self._numbers = {i: n for n, i in enumerate(self._own())}
        self._segmenters = dict(segmenters or {})
        self._tokens = np.empty((0, 0), np.int64)  # ids by column, _PADDING for none
        self._new = self._tokens

    # A forward: begin, then every layer, then end

    def begin(
        self,
        ragged: Ragged,
        tokens: Tensor | None = None,
        device: torch.device | str | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        """Announce new tokens, cut them into chunks, and let every layer with a policy take them.

        Parameters
        ----------
        ragged : Ragged
            Read with ``past=cache.real``.
        tokens : integer tensor [S], optional
            Their ids, packed. None: unknown (``inputs_embeds``), for policies that read none.
        device : torch.device or str, optional
            Of keys and values, for the first tokens. Default: that of ``tokens``, or the CPU.
        hidden : floating tensor [S, dim], optional
            What learned scores read.
        """
        sequences = len(ragged.cu_seqlens) - 1
        if self.state is None:
            self._start(sequences, device or ("cpu" if tokens is None else tokens.device))
        assert self.state is not None
        expected = f"{self.state.batch} rows, as the cache has"
        require(sequences == self.state.batch, "batch", expected, sequences)
        if not ragged.is_packed:
            self._new = np.where(ragged.real, 0, _PADDING)
            if self.score is not None and tokens is not None:
                self._new[ragged.real] = tokens.detach().cpu().numpy()
        self.state.begin(ragged.cu_seqlens)
        size = int(ragged.cu_seqlens[-1])
        for leader in sorted(set(self.state.leaders)):
            policy = self.state.policies[leader]
            ids, scores = self._inputs(policy, tokens, ragged.cu_seqlens)
            segmenter = self._segmenters.get(leader) or Segmenter(policy, 1)
            x = torch.zeros(size, 0) if hidden is None else hidden
            self.state.segment(leader, segmenter, ids, x, scores)

    def end(self) -> None:
        """Count the new columns, when all layers have taken their tokens."""
        self._tokens = np.concatenate([self._tokens, self._new], 1)
        self._new = self._tokens[:, :0]

    def layer(self, index: int) -> LayerCache:
        """Return the :class:`~dynchunk.cache.LayerCache` of a layer of the model."""
        assert self.state is not None
        return self.state.layers[self._numbers[index]]

    # Sizes

    @property
    def real(self) -> Mask | None:
        """Which tokens of the past were real, bool [B, P]; None before the first ones."""
        return None if self.state is None else self._tokens != _PADDING

    @property
    def nbytes(self) -> int:
        """Bytes really held by all layers: every storage once, whole, and the bookkeeping."""
        tensors = (x for layer in self._native() for x in (layer.keys, layer.values))
        storages = {x.untyped_storage().data_ptr(): x for x in tensors if x is not None}
        native = sum(int(x.untyped_storage().nbytes()) for x in storages.values())
        return native + self._tokens.nbytes + (0 if self.state is None else self.state.nbytes)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the keys and values of all tokens seen, in the layers with a policy."""
        if self.state is None:
            return 0
        return sum(self.state.lengths) * sum(map(_token_nbytes, self.state.layers))

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first tokens."""
        return -1 if self.state is None else self.state.batch

    @property
    def columns(self) -> int:
        """Columns seen, padding included."""
        return int(self._tokens.shape[1])

    # What transformers calls

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns; a negative number, or 0 for none."""
        require(tokens_to_remove <= 0, "tokens_to_remove", "an integer <= 0", tokens_to_remove)
        kept = max(0, self.columns + tokens_to_remove)
        if self.state is not None and tokens_to_remove < 0:
            self.state.crop((self._tokens[:, :kept] != _PADDING).sum(1).tolist())
            self._tokens = self._tokens[:, :kept].copy()
        for layer in self._native():
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, and of how many rows the batch was."""
        self.state, self._tokens = None, np.empty((0, 0), np.int64)
        for layer in self._native():
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every place of the batch the row that was at ``beam_idx``."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self._tokens = self._tokens[beam_idx.cpu().numpy()]
        for layer in self._native():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, copies side by side."""
        if self.state is not None:
            self.state.repeat(repeats)
            self._tokens = self._tokens.repeat(repeats, 0)
        for layer in self._native():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, given by number or as a mask."""
        if self.state is not None:
            rows = np.arange(self.state.batch)[indices.cpu().numpy()]
            self.state.select(rows.tolist())
            self._tokens = self._tokens[rows]
        for layer in self._native():
            layer.batch_select_indices(indices)

    def fork(self) -> ChunkedCache:
        """Return another cache with the same past; the entries of that are held once."""
        other = copy.copy(self)
        other.layers = [
            ChunkedLayer(other) if isinstance(layer, ChunkedLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        other.state = None if self.state is None else self.state.fork()
        other._tokens = self._tokens.copy()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedCache:
        return self.fork()

    def __repr__(self) -> str:
        lengths = [] if self.state is None else list(self.state.lengths)
        share = (
            f", {self.nbytes / self.full_nbytes:.3f} of a full cache" if self.full_nbytes else ""
        )
        return (
            f"ChunkedCache(layers={len(self.layers)}, lengths={lengths}, "
            f"nbytes={self.nbytes}{share})"
        )

    def _own(self) -> Iterable[int]:
        return (i for i, policy in enumerate(self.policies) if policy is not None)

    def _native(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, ChunkedLayer)]

    def _start(self, sequences: int, device: torch.device | str) -> None:
        own = [policy for policy in self.policies if policy is not None]
        self.state = Cache(
            own, sequences, rollback=self.rollback, page_size=self.page_size, device=device
        )
        self._tokens = np.empty((sequences, 0), np.int64)

    def _inputs(
        self, policy: Policy, tokens: Tensor | None, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the token ids that a policy scores, and the scores that are given to it."""
        if not isinstance(policy.boundaries, BoundaryRule):
            return torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64), None
        if tokens is None:
            raise ValueError(
                "inputs_embeds: the policy's boundaries follow the ids of the tokens; pass "
                "input_ids, or a policy of fixed strides"
            )
        if policy.score is not None:
            return tokens, None
        past = [row[row != _PADDING] for row in self._tokens]
        return tokens, given_scores(self.score, tokens, cu_seqlens, past)


class ChunkedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer with a policy, as transformers sees it: its rows are in the cache's ``state``."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: ChunkedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there are no keys and values of a fixed shape."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: attention stores them, when it makes entries."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns a mask has, and the first of them."""
        return self._cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the logical length: columns seen."""
        return self._cache.columns

    def get_max_length(self) -> int:
        """Return -1: there is none."""
        return -1

    def reset(self) -> None:
        """Do nothing: the cache does it for all layers."""


def _native_layers(config: Any) -> dict[int, Any]:
    require(config is not None, "config", "the decoder's, for layers without a policy", config)
    return dict(enumerate(DynamicCache(config=config).layers))


def _token_nbytes(layer: LayerCache) -> int:
    """Bytes of one token's key and value."""
    held = layer.rows or {name: x.flatten(0, 1) for name, x in layer.entries.items()}
    rows = [held[name] for name in ("k", "v") if name in held]
    return sum(math.prod(x.shape[1:]) * x.element_size() for x in rows)
