"""Rules token by token: the same boundaries, each when it is known, with rollback."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dynchunk._checks import describe, require, require_int, require_state
from dynchunk.chunks import Chunks, Kind, _from_closings
from dynchunk.ops.boundaries import RuleParameters

_KINDS = tuple(Kind)  # an index, where Kind(..) would be a search


class Boundary(NamedTuple):
    """A boundary of a stream: the first token of a chunk."""

    position: int
    confirmed_at: int  #: the token at whose arrival it became known
    kind: Kind


class BoundaryStream:
    """A :class:`BoundaryRule` on one sequence whose scores arrive bit by bit.

    Keeps every score (8 bytes a token), so that it can go back to any length, until :meth:`forget`
    says how far back that has to be. A push that raises leaves the stream as it was.

    Examples
    --------
    >>> from dynchunk.boundaries import BoundaryRule
    >>> stream = BoundaryRule(radius=1, max_length=4).stream()
    >>> [boundary.position for score in [0.0, 1.0, 0.0] for boundary in stream.push(score)]
    [0, 1]
    >>> stream.truncate(1)
    >>> len(stream), stream.boundaries
    (1, [Boundary(position=0, confirmed_at=0, kind=<Kind.START: 0>)])
    """

    def __init__(self, parameters: RuleParameters) -> None:
        from dynchunk.ops.cpu.boundaries import advance  # numba is imported when first used

        self._advance = advance
        self._parameters = parameters
        self._scores = np.empty(64)
        self._first = 0  # token of the first score that is kept
        self._earliest = 0  # length to which the stream can go back
        self._length = 0
        radius, _, m, M, ladder = parameters
        self._settings = np.array([radius, m, M, ladder], np.int64)
        self._out = np.empty((3, 2 + m), np.int64)
        self._boundaries: list[Boundary] = []

    def __len__(self) -> int:
        return self._length

    @property
    def boundaries(self) -> list[Boundary]:
        """All boundaries that are known and not forgotten, in order."""
        return list(self._boundaries)

    def push(self, scores: float | Tensor | ArrayLike) -> list[Boundary]:
        """Take the scores of the next tokens, return the boundaries that they make known.

        Parameters
        ----------
        scores : float, or floating tensor or array [k]

        Raises
        ------
        ValueError
            On NaN or another shape.
        """
        old = self._length
        if isinstance(scores, Tensor) and scores.shape == (1,) and scores.is_floating_point():
            scores = scores.item()
        if type(scores) is float:  # one token: the path of every decoding step
            if scores != scores:
                raise ValueError(f"scores: expected numbers, got NaN at token {old}")
            new, out = old + 1, self._out
            if old - self._first == len(self._scores):
                self._grow(new)
            self._scores[old - self._first] = scores
        else:
            values = _as_array(scores)
            bad = np.isnan(values)
            if bad.any():
                raise ValueError(f"scores: expected numbers, got NaN at token {old + bad.argmax()}")
            new = old + len(values)
            out = np.empty((3, len(values) + self._out.shape[1]), np.int64)
            self._grow(new)
            self._scores[old - self._first : new - self._first] = values
        self._length = new
        known = self._boundaries
        start = []
        if not known and new > 0:
            start = [Boundary(0, 0, Kind.START)]
            known += start
        first = self._first
        base = known[-1].position - first if known else 0
        count = self._advance(
            self._scores,
            old - first,
            new - first,
            base,
            self._settings,
            self._parameters.threshold,
            out,
        )
        if count == 0:
            return start
        out[:2, :count] += first
        found = [Boundary(at, when, _KINDS[kind]) for at, when, kind in out[:, :count].T.tolist()]
        known += found
        return start + found

    def forget(self, n: int) -> None:
        """Drop what only going back to fewer than ``n`` tokens would need.

        Then the stream holds no more than the tokens since ``n`` and what the rule reads before
        them, and :meth:`truncate` goes back to ``n``, or to 0.

        Examples
        --------
        >>> from dynchunk.boundaries import BoundaryRule
        >>> stream = BoundaryRule(radius=1, max_length=4).stream()
        >>> _ = stream.push(torch.rand(1000))
        >>> stream.forget(900)
        >>> stream.nbytes < 2000
        True
        """
        require_int("n", n, 0)
        require(n <= self._length, "n", f"at most the length {self._length}", n)
        self._earliest = n = max(n, self._earliest)
        radius, _, _, M, ladder = self._parameters
        first = n - self._parameters.lag - radius - (M if ladder else 0) - 2
        known = self._boundaries
        earlier = 0
        while earlier + 1 < len(known) and known[earlier + 1].confirmed_at < n:
            earlier += 1
        del known[:earlier]
        if 2 * (first - self._first) > len(self._scores):  # less often than it would be possible
            kept = self._scores[first - self._first : self._length - self._first]
            self._scores = np.empty(max(64, len(kept) + len(kept) // 2))
            self._scores[: len(kept)] = kept
            self._first = first

    @property
    def nbytes(self) -> int:
        """Bytes of the scores that are kept."""
        return self._scores.nbytes

    def copy(self) -> BoundaryStream:
        """Return a stream that goes on from here by itself."""
        other = BoundaryStream(self._parameters)
        other._scores, other._boundaries = self._scores.copy(), list(self._boundaries)
        other._first, other._earliest, other._length = self._first, self._earliest, self._length
        return other

    def truncate(self, n: int) -> None:
        """Go back to the first ``n`` tokens, as if the others had never come.

        Raises
        ------
        ValueError
            There are fewer, or :meth:`forget` has dropped what that would need.
        """
        require_int("n", n, 0)
        require(n <= self._length, "n", f"at most the length {self._length}", n)
        if n == 0:
            self._first = self._earliest = 0
        earliest = self._earliest
        require(n >= earliest, "n", f"at least {earliest} (the rest is forgotten), or 0", n)
        self._length = n
        while self._boundaries and self._boundaries[-1].confirmed_at >= n:
            self._boundaries.pop()

    def chunks(self) -> Chunks:
        """Return the chunks of the tokens so far, equal to the rule's on all their scores."""
        require(self._earliest == 0, "chunks", "a stream that forgot nothing", self._earliest)
        return _chunks(self._length, self._boundaries)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs: the rule, the scores, what is known."""
        return {
            "rule": self._parameters._asdict(),
            "scores": torch.from_numpy(self._scores[: self._length - self._first].copy()),
            "boundaries": torch.tensor(self._boundaries, dtype=torch.int64).reshape(-1, 3),
            "first": self._first,
            "earliest": self._earliest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the stream that ``state`` was taken from.

        Raises
        ------
        TypeError, ValueError
            A field is missing or unknown, or the state belongs to another rule.
        """
        require_state(state, {"rule", "scores", "boundaries", "first", "earliest"})
        rule = self._parameters._asdict()
        require(state["rule"] == rule, "state['rule']", f"the rule of this stream, {rule}", state)
        scores = _as_array(state["scores"])
        first = require_int("state['first']", state["first"], 0)
        earliest = require_int("state['earliest']", state["earliest"], 0)
        known = [
            Boundary(at, when, _KINDS[kind]) for at, when, kind in state["boundaries"].tolist()
        ]
        self.truncate(0)
        self._grow(len(scores))
        self._scores[: len(scores)] = scores
        self._boundaries = known
        self._first, self._earliest, self._length = first, earliest, first + len(scores)

    def _grow(self, length: int) -> None:
        """Make room for so many tokens."""
        needed = length - self._first
        if needed > len(self._scores):
            larger = np.empty(max(needed, 2 * len(self._scores)))
            kept = self._length - self._first
            larger[:kept] = self._scores[:kept]
            self._scores = larger


class FixedStream:
    """A :class:`FixedStride` token by token; a grid line is known from the token before it on.

    Examples
    --------
    >>> from dynchunk.boundaries import FixedStride
    >>> FixedStride(2).stream().push(torch.zeros(4))
    [Boundary(position=0, confirmed_at=0, kind=<Kind.START: 0>),
     Boundary(position=2, confirmed_at=1, kind=<Kind.GIVEN: 3>),
     Boundary(position=4, confirmed_at=3, kind=<Kind.GIVEN: 3>)]
    """

    def __init__(self, stride: int, offset: int) -> None:
        self._stride, self._offset = stride, offset
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def boundaries(self) -> list[Boundary]:
        """All boundaries that are known, in order."""
        return self._known(0, self._length)

    def push(self, scores: float | Tensor | ArrayLike) -> list[Boundary]:
        """Take the next tokens (only their number counts), return the boundaries now known."""
        old = self._length
        self._length += 1 if type(scores) is float else len(_as_array(scores))
        return self._known(old, self._length)

    def forget(self, n: int) -> None:
        """Do nothing: a grid can be counted back to any length."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept for each token: none."""
        return 0

    def copy(self) -> FixedStream:
        """Return a stream that goes on from here by itself."""
        other = FixedStream(self._stride, self._offset)
        other._length = self._length
        return other

    def _known(self, old: int, new: int) -> list[Boundary]:
        first = self._offset or self._stride
        index = max(0, -(-(old + 1 - first) // self._stride))
        lines = range(first + index * self._stride, new + 1, self._stride)
        start = [Boundary(0, 0, Kind.START)] if old == 0 < new else []
        return start + [Boundary(at, at - 1, Kind.GIVEN) for at in lines]

    def truncate(self, n: int) -> None:
        """Go back to the first ``n`` tokens."""
        require_int("n", n, 0)
        require(n <= self._length, "n", f"at most the length {self._length}", n)
        self._length = n

    def chunks(self) -> Chunks:
        """Return the chunks of the tokens so far."""
        return Chunks.fixed(self._stride, self._length, self._offset)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs."""
        return {"stride": self._stride, "offset": self._offset, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the stream that ``state`` was taken from; another rule's state is an error."""
        require_state(state, {"stride", "offset", "length"})
        grid = (state["stride"], state["offset"])
        expected = (self._stride, self._offset)
        require(grid == expected, "state", f"(stride, offset) = {expected}", grid)
        self._length = require_int("state['length']", state["length"], 0)


def _as_array(scores: Tensor | ArrayLike) -> np.ndarray:
    if isinstance(scores, Tensor):
        require(scores.is_floating_point(), "scores", "a floating tensor [k]", scores)
        scores = scores.detach().to("cpu", torch.float64).numpy()
    values = np.asarray(scores)
    if values.ndim != 1 or not (np.issubdtype(values.dtype, np.floating) or values.size == 0):
        raise ValueError(f"scores: expected floating numbers [k], got {describe(scores)}")
    return values


def _chunks(length: int, boundaries: list[Boundary]) -> Chunks:
    cu = torch.tensor([0, length])
    at, known, kinds = torch.tensor(boundaries[1:], dtype=torch.int64).reshape(-1, 3).T.contiguous()
    return _from_closings(cu, at, known, kinds.to(torch.int8))
