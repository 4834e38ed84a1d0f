"""Raw rows of the latest tokens of each sequence, in one buffer per name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.cache.closings import Integers

#: More new tokens of one sequence than that are a prefill.
FEW = 16

_SLACK = 64


def ranges(begin: Integers, counts: Integers) -> Integers:
    """Return begin[0], begin[0] + 1, .. for each of them, ``counts`` numbers each.

    >>> ranges(np.array([5, 9]), np.array([2, 1])).tolist()
    [5, 6, 9]
    """
    offsets = np.cumsum(counts) - counts
    index: Integers = np.arange(int(counts.sum())) + np.repeat(begin - offsets, counts)
    return index


class Move(NamedTuple):
    """How the rows of new tokens join those that are held.

    A few tokens are written behind the others. Else, or where there is no room, a step reads a
    packed buffer of the held and the new rows, sequence after sequence, and what is to be held
    after it goes back.
    """

    row_of_first: Integers  #: [B], row of each sequence's token 0 in what the step reads
    new: Integers  #: rows there of the new tokens
    size: int  #: rows of the buffers that stay
    packed: Packing | None


class Packing(NamedTuple):
    """Which rows go where in a packed step."""

    offsets: Integers  #: [B+1], of each sequence in the packed buffer
    held: Integers  #: rows of the held tokens in the old buffer
    held_to: Integers  #: and in the packed one
    kept: Integers  #: rows of the tokens to hold in the packed buffer
    kept_to: Integers  #: and in the new one


class RowMap:
    """Which tokens of B sequences are held, and in which rows: tokens begin .. end - 1.

    All buffers of one map have ``capacity`` rows for each sequence. Bookkeeping only; a
    :class:`Rows` has the buffers.
    """

    def __init__(self, batch: int) -> None:
        self.begin, self.end = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.row_of_first = np.zeros(batch, np.int64)
        self.capacity = 0

    def extend(self, counts: Integers, begin: Integers, *, packed: bool = False) -> Move:
        """Take new tokens, hold those from ``begin`` on, and say how rows have to move."""
        end = self.end + counts
        limits = np.arange(1, len(end) + 1) * self.capacity
        if packed or counts.max(initial=0) > FEW or (self.row_of_first + end > limits).any():
            return self._pack(counts, begin)
        new = ranges(self.row_of_first + self.end, counts)
        self.begin, self.end = begin, end
        return Move(self.row_of_first, new, len(end) * self.capacity, None)

    def _pack(self, counts: Integers, begin: Integers) -> Move:
        held, end = self.end - self.begin, self.end + counts
        offsets = np.concatenate([[0], np.cumsum(held + counts)])
        old_first, first = self.row_of_first, offsets[:-1] - self.begin
        kept = end - begin
        self._fit(int(kept.max(initial=0)))
        self.row_of_first = np.arange(len(end)) * self.capacity - begin
        packing = Packing(
            offsets,
            ranges(old_first + self.begin, held),
            ranges(first + self.begin, held),
            ranges(first + begin, kept),
            ranges(self.row_of_first + begin, kept),
        )
        new = ranges(first + self.end, counts)
        self.begin, self.end = begin, end
        return Move(first, new, len(end) * self.capacity, packing)

    def _fit(self, kept: int) -> None:
        wanted = kept + kept // 16 + _SLACK
        if not kept + _SLACK // 2 <= self.capacity <= wanted + _SLACK:
            self.capacity = wanted

    def place(self, begin: Integers, end: Integers) -> None:
        """Hold the tokens begin .. end - 1, in buffers of the right size."""
        self.begin, self.end = begin, end.copy()
        self._fit(int((end - begin).max(initial=0)))
        self.row_of_first = np.arange(len(end)) * self.capacity - begin

    @property
    def is_loose(self) -> bool:
        """Whether buffers are much larger than what they hold."""
        kept = int((self.end - self.begin).max(initial=0))
        return self.capacity > kept + kept // 8 + 2 * _SLACK

    def repack(self) -> Move:
        """Say how rows have to move into buffers of the right size."""
        self.capacity = 0
        return self._pack(np.zeros_like(self.end), self.begin)

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b."""
        self.end[b] = n
        if self.begin[b] > n:
            self.begin[b], self.row_of_first[b] = n, b * self.capacity - n

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order."""
        moved = (np.arange(len(index)) - index) * self.capacity
        self.row_of_first = self.row_of_first[index] + moved
        self.begin, self.end = self.begin[index], self.end[index]

    def rows(self) -> Integers:
        """Return the rows of all held tokens."""
        return ranges(self.row_of_first + self.begin, self.end - self.begin)

    def copy(self) -> RowMap:
        """Return the same map on its own."""
        other = RowMap(0)
        other.begin, other.end = self.begin.copy(), self.end.copy()
        other.row_of_first, other.capacity = self.row_of_first.copy(), self.capacity
        return other


class Rows(dict[str, Tensor]):
    """Named buffers [B * capacity, ...] of one :class:`RowMap`."""

    def extend(self, move: Move, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Store the rows of new tokens; return the buffers that this step reads."""
        self.check(new, len(move.new))
        if move.packed is None:
            for name, x in new.items():
                if name not in self:
                    self[name] = x.new_empty(move.size, *x.shape[1:])
                self[name].index_copy_(0, _index(move.new, x), x)
            return {name: self[name] for name in new}
        read = {}
        for name, x in new.items():
            total = int(move.packed.offsets[-1])
            packed = x.new_empty(total, *x.shape[1:])
            if name in self:
                packed[_index(move.packed.held_to, x)] = self[name][_index(move.packed.held, x)]
            packed[_index(move.new, x)] = x
            self._keep(name, packed, move.packed, move.size)
            read[name] = packed
        return read

    def repack(self, move: Move) -> None:
        """Move what is held into buffers of another size."""
        assert move.packed is not None
        for name, x in self.items():
            self._keep(name, x[_index(move.packed.held, x)], move.packed, move.size)

    def select(self, index: Integers, where: RowMap) -> None:
        """Keep the sequences of ``index``, in that order, as the map has not yet."""
        for name, x in self.items():
            rows = x.reshape(len(where.end), where.capacity, *x.shape[1:])
            self[name] = rows[_index(index, x)].flatten(0, 1)

    def place(self, where: RowMap, packed: dict[str, Tensor]) -> None:
        """Fill buffers with the rows that a map holds, sequence after sequence."""
        for name, x in packed.items():
            self[name] = x.new_empty(len(where.end) * where.capacity, *x.shape[1:])
            self[name][_index(where.rows(), x)] = x

    def copy(self) -> Rows:
        """Return the same rows in buffers of their own."""
        return Rows({name: x.clone() for name, x in self.items()})

    def check(self, new: dict[str, Tensor], count: int) -> None:
        """Raise unless there are ``count`` new rows, of the dtype and shape of those held."""
        for name, x in new.items():
            like = self.get(name, x)
            kind = str(like.dtype).removeprefix("torch.")
            same = x.dtype == like.dtype and x.shape[1:] == like.shape[1:]
            expected = f"a {kind} tensor of shape {[count, *like.shape[1:]]}"
            require(len(x) == count and same, name, expected, x)

    def _keep(self, name: str, packed: Tensor, packing: Packing, size: int) -> None:
        held = self.get(name)
        if held is None or len(held) != size:
            held = packed.new_empty(size, *packed.shape[1:])
        held[_index(packing.kept_to, packed)] = packed[_index(packing.kept, packed)]
        self[name] = held


def _index(rows: Integers, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)
