"""Surprisal under a small n-gram model: units begin where the next token is hard to guess."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import describe, require, require_int, require_tokens
from dynchunk.boundaries.scores.base import Score
from dynchunk.boundaries.scores.hash import hash_last
from dynchunk.chunks import SequenceOffsets, as_cu_seqlens

_VERSION = 1
_STEP = 2.0**-10  # scores are multiples of it, so that rounding cannot tell equal contexts apart


class _Order(NamedTuple):
    """Counts of the k-grams of one order, by hash; sorted for binary search."""

    grams: Tensor  # int64 [n]
    counts: Tensor  # int64 [n]
    contexts: Tensor  # int64 [c], hashes of the k - 1 tokens before
    totals: Tensor  # int64 [c], how often a context was seen
    distinct: Tensor  # int64 [c], how many different tokens followed it


class SurprisalScore(Score):
    """-log p(token | the n - 1 tokens before it) in nats, under an interpolated n-gram model.

    Witten-Bell smoothing (IEEE Trans. Information Theory 37, 1991): a context seen N times, with D
    different continuations, gives weight N / (N + D) to its own counts and D / (N + D) to the next
    shorter context, down to the uniform distribution. The score at t reads n tokens:
    ``receptive_field`` = n - 1. Rounded to multiples of 2^-10.

    Build one with :meth:`fit` or :meth:`load`.

    Examples
    --------
    >>> corpus = torch.tensor(list(b"the cat, the dog, the cow, the cat"))
    >>> score = SurprisalScore.fit(corpus, order=3, vocab_size=256)
    >>> easy, hard = score(torch.tensor(list(b"the c")))[[2, 4]]
    >>> bool(easy < hard)
    True
    """

    def __init__(self, orders: list[_Order], vocab_size: int) -> None:
        self._orders = orders
        self.vocab_size = vocab_size
        self.receptive_field = len(orders) - 1

    @property
    def order(self) -> int:
        """Length n of the longest n-grams."""
        return len(self._orders)

    @classmethod
    def fit(
        cls,
        tokens: Tensor,
        order: int,
        vocab_size: int,
        cu_seqlens: SequenceOffsets | None = None,
    ) -> SurprisalScore:
        """Count the n-grams of a corpus.

        Parameters
        ----------
        tokens : integer tensor [T], T >= 1
        order : int >= 1
        vocab_size : int >= 1
        cu_seqlens : offsets [B+1] of the corpus' documents, optional
        """
        ids = _require_ids(tokens, require_int("vocab_size", vocab_size, 1))
        require(len(ids) > 0, "tokens", "a corpus of at least one token", tokens)
        require_int("order", order, 1)
        cu = as_cu_seqlens(len(ids) if cu_seqlens is None else cu_seqlens, ids.device)
        begin = torch.repeat_interleave(cu[:-1], cu.diff(), output_size=len(ids))
        offsets = torch.arange(len(ids), device=ids.device) - begin
        return cls([_count(ids, offsets, k) for k in range(1, order + 1)], vocab_size)

    def check(self, tokens: object) -> Tensor:
        """Return integer token ids [T], all of them in the vocabulary."""
        return _require_ids(tokens, self.vocab_size)

    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return float32 scores [T]."""
        p = torch.full(tokens.shape, 1 / self.vocab_size, dtype=torch.float64, device=tokens.device)
        for k, table in enumerate(self._orders, start=1):
            gram, context = _grams(tokens, offsets, k)
            count = _look_up(table.grams, table.counts, gram)
            total = _look_up(table.contexts, table.totals, context)
            distinct = _look_up(table.contexts, table.distinct, context)
            known = (total > 0) & (offsets >= k - 1)
            p = torch.where(known, (count + distinct * p) / (total + distinct).clamp(min=1), p)
        return ((-p.log() / _STEP).round() * _STEP).float()

    def to(self, device: torch.device | str) -> SurprisalScore:
        """Return the same model on ``device``."""
        orders = [_Order(*(field.to(device) for field in order)) for order in self._orders]
        return SurprisalScore(orders, self.vocab_size)

    def save(self, path: str | Path) -> None:
        """Write the model to ``path`` (numpy's .npz format, without pickles)."""
        arrays = {
            f"{name}{k}": field.cpu().numpy()
            for k, order in enumerate(self._orders)
            for name, field in order._asdict().items()
        }
        header = np.array([_VERSION, self.vocab_size, self.order])
        with open(path, "wb") as file:
            np.savez_compressed(file, header=header, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> SurprisalScore:
        """Read a model that :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            No such file; or it is no model of this version.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                version, vocab_size, order = (int(x) for x in file["header"])
                require(version == _VERSION, "path", f"a model of version {_VERSION}", version)
                orders = [
                    _Order(*(torch.from_numpy(file[f"{name}{k}"]) for name in _Order._fields))
                    for k in range(order)
                ]
        except (BadZipFile, EOFError, KeyError, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(
                f"path: expected a file written by SurprisalScore.save, got {describe(str(path))} "
                f"({error})"
            ) from error
        return cls(orders, vocab_size)


def _require_ids(tokens: object, vocab_size: int) -> Tensor:
    ids = require_tokens("tokens", tokens)
    if len(ids):
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0 and high < vocab_size, "tokens", f"ids in [0, {vocab_size})", (low, high))
    return ids


def _grams(tokens: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Hashes of the k tokens up to each position and of the k - 1 before it, int64 [T] each."""
    gram = hash_last(tokens, offsets, k, seed=k)
    context = hash_last(tokens.roll(1), offsets - 1, k - 1, seed=k)
    return gram, context


def _count(tokens: Tensor, offsets: Tensor, k: int) -> _Order:
    is_whole = offsets >= k - 1
    gram, context = (keys[is_whole] for keys in _grams(tokens, offsets, k))
    grams, which, counts = torch.unique(gram, return_inverse=True, return_counts=True)
    contexts, totals = torch.unique(context, return_counts=True)
    context_of_gram = context.new_empty(len(grams)).index_copy(0, which, context)
    distinct = torch.unique(context_of_gram, return_counts=True)[1]
    return _Order(grams, counts, contexts, totals, distinct)


def _look_up(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    """Value of each query, 0 where it is no key."""
    if len(keys) == 0:
        return torch.zeros_like(query)
    keys, values = keys.to(query.device), values.to(query.device)
    at = torch.searchsorted(keys, query).clamp(max=len(keys) - 1)
    return torch.where(keys[at] == query, values[at], 0)
