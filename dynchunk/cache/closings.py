"""The closed chunks of one sequence, as they become known."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynchunk.attention.specs import Midpoints, Shifted, View

Integers = NDArray[np.int64]


class Closings:
    """Where the closed chunks of one sequence end in one view, and when that became known.

    Chunk i is the tokens ``start(i) .. ends[i] - 1``, and its entry may be read from token
    ``known[i]`` on. Both increase, so that going back is dropping the last ones.

    Examples
    --------
    >>> closings = Closings()
    >>> closings.append([4, 8], [5, 9])
    >>> closings.truncate(9)  # token 9 has not come
    >>> len(closings), closings.start(1)
    (1, 4)
    """

    __slots__ = ("_data", "_size")

    def __init__(self) -> None:
        self._data = np.empty((2, 8), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def ends(self) -> Integers:
        """One past the last token of each closed chunk."""
        return self._data[0, : self._size]

    @property
    def known(self) -> Integers:
        """The token at whose arrival each became known."""
        return self._data[1, : self._size]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._data.nbytes

    def start(self, i: int) -> int:
        """Return the first token of chunk i; that of the open chunk for i = len."""
        return int(self._data[0, i - 1]) if i else 0

    def starts(self, begin: int, end: int) -> Integers:
        """Return the first tokens of chunks begin .. end - 1."""
        if begin:
            return self._data[0, begin - 1 : end - 1]
        return np.concatenate([[0], self.ends[:end]])[:end]

    def count(self, n: int) -> int:
        """Return how many were known when ``n`` tokens had come."""
        return int(np.searchsorted(self.known, n))

    def append(self, ends: ArrayLike, known: ArrayLike) -> None:
        """Add the next ones."""
        more = np.asarray([ends, known], np.int64)
        size = self._size + more.shape[1]
        if size > self._data.shape[1]:
            larger = np.empty((2, size + size // 8 + 8), np.int64)
            larger[:, : self._size] = self._data[:, : self._size]
            self._data = larger
        self._data[:, self._size : size] = more
        self._size = size

    def truncate(self, n: int) -> None:
        """Drop those that were not known when ``n`` tokens had come."""
        self._size = self.count(n)
        if 2 * self._size < self._data.shape[1] - 8:
            self._data = self._data[:, : self._size].copy()

    def copy(self) -> Closings:
        """Return the same closings on their own."""
        other = Closings()
        other._data, other._size = self._data[:, : self._size].copy(), self._size
        return other


def follow(view: View, base: Closings, moved: Closings, n: int) -> None:
    """Bring the closings of a derived view up to date with those it comes from and ``n`` tokens.

    The same cuts, known at the same tokens, as :meth:`dynchunk.chunks.Chunks.shifted` and
    :meth:`dynchunk.chunks.Chunks.midpoints` give for the whole sequence.
    """
    if isinstance(view, Midpoints):
        lost = int(len(base) > 0 and base.ends[0] == 1)  # a chunk of one token has no middle
        first = lost + len(moved)
        starts, ends = base.starts(first, len(base)), base.ends[first:]
        moved.append(starts + (ends - starts) // 2, base.known[first:])
    elif isinstance(view, Shifted):
        k = view.k
        if k > 0 and len(moved) == 0 and n >= k:  # the sequence's first token is a boundary too
            moved.append([k], [k - 1])
        if k > 0:
            first = max(0, len(moved) - 1) if len(moved) else len(base)
        else:
            first = int(np.searchsorted(base.ends, -k, side="right")) + len(moved)
        at = base.ends[first:] + k
        known = np.maximum(base.known[first:], at - 1)
        ready = int(np.searchsorted(known, n))
        moved.append(at[:ready], known[:ready])
