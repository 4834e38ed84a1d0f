"""The recall task: pairs of a key and a value among filler, asked for beyond the raw window.

A sequence is a prefix, a context that holds the pairs, a gap, and the queries:

    filler | filler key value filler filler key value .. | filler | key value key value ..

The prefix has o1 + o2 tokens, both drawn from 0..period-1. Each of the two makes every residue mod
``period`` equally likely; together they also give every residue the same mean position, and the
same variance but for the edges of the context, for every stride that divides ``period``. The
distance between a pair and its query does not depend on the prefix, and so not on the phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import require, require_int


class TokenClass(IntEnum):
    """What a token is: what a tokenizer's vocabulary tells for free."""

    FILLER = 0
    KEY = 1  #: the first token of a key
    INNER = 2  #: a later token of a key
    VALUE = 3


class RecallBatch(NamedTuple):
    """Sequences of equal length, and what is asked in each."""

    tokens: Tensor  #: int64 [B, T]
    asked_at: Tensor  #: int64 [B, Q], the last key token of each query: the value must follow
    answers: Tensor  #: int64 [B, Q], the values
    positions: Tensor  #: int64 [B, Q], first token of the pair that is asked for
    pairs: Tensor  #: int64 [B, Q], a number for each (key, value)
    context: slice  #: the tokens that hold the pairs


class MovedBatch(NamedTuple):
    """Sequences of which only one target pair moves, token by token."""

    tokens: Tensor  #: int64 [B, M, T], ending with the query
    answers: Tensor  #: int64 [B]
    positions: Tensor  #: int64 [B, M], first token of the target


class _Pairs(NamedTuple):
    keys: Tensor  # [B, P, key_length]
    values: Tensor  # [B, P]
    numbers: Tensor  # [B, P]


@dataclass(frozen=True, slots=True)
class RecallTask:
    """Settings of the task, and its samples.

    Parameters
    ----------
    pairs, queries : int
        Pairs in the context, and how many of them are asked for.
    context : int
        Tokens that hold pairs and filler.
    stretch : int, optional
        Pack the pairs into so many tokens at a random place of the context: uneven density.
    gap : int
        Filler before the queries. At least the raw window, if all pairs are to be compressed.
    key_length : int
        Tokens of a key, 1 to 3; a value has one.
    run : int
        Length of one run of equal filler tokens in the context; 0: none.
    keys, values, fillers : int
        Sizes of the vocabularies; later tokens of keys have one of their own, as large as ``keys``.
    period : int
        A multiple of all strides to compare, see the module; 1: no prefix.

    Examples
    --------
    >>> batch = RecallTask().draw(2, seed=0)
    >>> row, query = batch.tokens[0], 5
    >>> at, asked = batch.positions[0, query], batch.asked_at[0, query]
    >>> bool(row[at] == row[asked]), bool(row[at + 1] == batch.answers[0, query])
    (True, True)
    """

    pairs: int = 24
    queries: int = 16
    context: int = 96
    stretch: int | None = None
    gap: int = 12
    key_length: int = 1
    run: int = 0
    keys: int = 64
    values: int = 64
    fillers: int = 32
    period: int = 24

    def __post_init__(self) -> None:
        positive = ("pairs", "queries", "context", "keys", "values", "fillers", "period")
        for name in positive:
            require_int(name, getattr(self, name), 1)
        require_int("gap", self.gap, 0)
        require_int("run", self.run, 0)
        require(self.key_length in (1, 2, 3), "key_length", "1, 2 or 3", self.key_length)
        require(self.queries <= self.pairs, "queries", f"at most {self.pairs} pairs", self.queries)
        distinct = self.keys**self.key_length
        require(
            self.pairs <= distinct // 2, "pairs", f"at most half of {distinct} keys", self.pairs
        )
        used = self.pairs * self.width
        room = self.context - self.run if self.stretch is None else self.stretch
        require(used <= room, "pairs", f"at most {room} tokens of pairs", used)
        if self.stretch is not None:
            outer = self.context - self.run
            require(self.stretch <= outer, "stretch", f"at most {outer} tokens", self.stretch)

    @classmethod
    def uneven(cls, **settings: int) -> RecallTask:
        """Pack 24 pairs into 64 tokens (more with longer keys) at a random place of 176."""
        stretch = 16 + 24 * (1 + settings.get("key_length", 1))
        return cls(**{"context": 176, "stretch": stretch, **settings})

    @property
    def width(self) -> int:
        """Tokens of a pair."""
        return self.key_length + 1

    @property
    def vocabulary(self) -> int:
        """Number of token ids: filler, first tokens of keys, later ones, values."""
        return self.fillers + 2 * self.keys + self.values

    @property
    def classes(self) -> Tensor:
        """The :class:`TokenClass` of every token id, int64 [vocabulary]."""
        sizes = torch.tensor([self.fillers, self.keys, self.keys, self.values])
        return torch.repeat_interleave(sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """The token ids that start a pair: first tokens of keys."""
        return tuple(range(self.fillers, self.fillers + self.keys))

    def draw(
        self, batch: int, *, seed: int, step: int = 0, prefix: int | None = None
    ) -> RecallBatch:
        """Sample sequences of equal length; equal arguments give equal sequences.

        Parameters
        ----------
        batch : int
        seed, step : int
            Batches of different steps are independent.
        prefix : int, optional
            Filler tokens in front. Default: drawn, one number for the batch.
        """
        generator = make_generator(seed, step)
        if prefix is None:
            prefix = int(torch.randint(self.period, (2,), generator=generator).sum())
        pairs = self._draw_pairs(batch, generator)
        tokens = self._filler(batch, prefix + self.context + self.gap, generator)
        starts, runs, _ = self._layout(batch, self.pairs, 0, generator)
        starts = starts + prefix
        _write(tokens, starts, torch.cat([pairs.keys, pairs.values[..., None]], 2))
        if self.run:
            equal = torch.randint(self.fillers, (batch, 1, 1), generator=generator)
            _write(tokens, runs + prefix, equal.expand(-1, -1, self.run))
        asked = torch.rand(batch, self.pairs, generator=generator).argsort(1)[:, : self.queries]
        keys = pairs.keys.gather(1, asked[..., None].expand(-1, -1, self.key_length))
        answers = pairs.values.gather(1, asked)
        queries = torch.cat([keys, answers[..., None]], 2).flatten(1)
        first = tokens.shape[1] + self.key_length - 1
        asked_at = first + self.width * torch.arange(self.queries)
        return RecallBatch(
            torch.cat([tokens, queries], 1),
            asked_at.expand(batch, -1),
            answers,
            starts.gather(1, asked),
            pairs.numbers.gather(1, asked),
            slice(prefix, prefix + self.context),
        )

    def draw_moved(
        self, batch: int, moves: int = 24, *, seed: int, step: int = 0, prefix: int = 0
    ) -> MovedBatch:
        """Sample sequences in which a target takes ``moves`` neighbouring places in turn.

        All other tokens, the query's place included, are the same in the M versions.
        """
        generator = make_generator(seed, step)
        pairs = self._draw_pairs(batch, generator)
        tokens = self._filler(batch, prefix + self.context + self.gap, generator)
        starts, runs, hole = self._layout(batch, self.pairs - 1, moves - 1 + self.width, generator)
        written = torch.cat([pairs.keys, pairs.values[..., None]], 2)
        _write(tokens, starts + prefix, written[:, 1:])
        if self.run:
            equal = torch.randint(self.fillers, (batch, 1, 1), generator=generator)
            _write(tokens, runs + prefix, equal.expand(-1, -1, self.run))
        places = hole + prefix + torch.arange(moves)  # [B, M]
        versions = tokens[:, None].repeat(1, moves, 1).flatten(0, 1)
        target = written[:, None, :1].expand(-1, moves, -1, -1).flatten(0, 1)
        _write(versions, places.reshape(-1, 1), target)
        versions = versions.reshape(batch, moves, -1)
        query = pairs.keys[:, None, 0].expand(-1, moves, -1)
        return MovedBatch(torch.cat([versions, query], 2), pairs.values[:, 0], places)

    def with_prefix(self, batch: RecallBatch, length: int, *, seed: int) -> RecallBatch:
        """Put ``length`` filler tokens in front of every sequence."""
        front = self._filler(len(batch.tokens), length, make_generator(seed, length))
        return RecallBatch(
            torch.cat([front, batch.tokens], 1),
            batch.asked_at + length,
            batch.answers,
            batch.positions + length,
            batch.pairs,
            slice(batch.context.start + length, batch.context.stop + length),
        )

    def _filler(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.fillers, (batch, length), generator=generator)

    def _draw_pairs(self, batch: int, generator: torch.Generator) -> _Pairs:
        """Draw pairs of which no two share a key."""
        shape, distinct = (batch, self.pairs), self.keys**self.key_length
        if self.key_length == 1:
            codes = torch.rand(batch, distinct, generator=generator).argsort(1)[:, : self.pairs]
        else:
            codes = torch.randint(distinct, shape, generator=generator)
            while bool((repeats := _has_repeats(codes)).any()):
                again = (int(repeats.sum()), self.pairs)
                codes[repeats] = torch.randint(distinct, again, generator=generator)
        place = torch.arange(self.key_length)
        keys = codes[..., None] // self.keys**place % self.keys + self.keys * (place > 0)
        values = torch.randint(self.values, shape, generator=generator)
        return _Pairs(
            keys + self.fillers,
            values + self.fillers + 2 * self.keys,
            codes * self.values + values,
        )

    def _layout(
        self, batch: int, pairs: int, hole: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """First tokens in the context: pairs [B, P], the run and the hole [B, 0 or 1]."""
        extra = [size for size in (self.run, hole) if size]
        widths = [self.width] * pairs
        if self.stretch is None:
            starts = _shuffle(widths + extra, self.context, batch, generator)
            starts, others = starts[:, :pairs], starts[:, pairs:]
        else:
            outer = _shuffle([self.stretch, *extra], self.context, batch, generator)
            starts = _shuffle(widths, self.stretch, batch, generator) + outer[:, :1]
            others = outer[:, 1:]
        has_run = int(self.run > 0)
        return starts, others[:, :has_run], others[:, has_run:]


#: Tasks by name.
TASKS = {
    "even": RecallTask(),
    "uneven": RecallTask.uneven(),
    "uneven-keys-2": RecallTask.uneven(key_length=2),
    "uneven-keys-3": RecallTask.uneven(key_length=3),
    "uneven-run": RecallTask.uneven(run=40),
}


def make_generator(*seeds: int) -> torch.Generator:
    """Return a generator for a tuple of seeds; other tuples give independent ones."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def _has_repeats(codes: Tensor) -> Tensor:
    return (codes.sort(1).values.diff(dim=1) == 0).any(1)


def _shuffle(widths: list[int], total: int, batch: int, generator: torch.Generator) -> Tensor:
    """First tokens [B, items] of items in random order, filled up to ``total`` by single tokens."""
    require(sum(widths) <= total, "context", f"at least {sum(widths)} tokens", total)
    lengths = torch.tensor(widths + [1] * (total - sum(widths)))
    order = torch.rand(batch, len(lengths), generator=generator).argsort(1)
    ends = lengths[order].cumsum(1)
    starts = torch.empty_like(ends).scatter_(1, order, ends - lengths[order])
    return starts[:, : len(widths)]


def _write(tokens: Tensor, starts: Tensor, items: Tensor) -> None:
    """Write items [B, K, w] at their first tokens [B, K]."""
    at = starts[..., None] + torch.arange(items.shape[2])
    tokens.scatter_(1, at.flatten(1), items.flatten(1))
