"""What all scorers share: packed sequences, declared reach, weighted sums."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dynchunk._checks import describe
from dynchunk.chunks import SequenceOffsets, as_cu_seqlens


class Score(ABC):
    """A function from packed tokens [T] (or one vector per token, [T, ...]) to scores [T].

    To add one: subclass, set ``receptive_field``, implement :meth:`score`.

    Examples
    --------
    >>> class Digit(Score):
    ...     receptive_field = 0
    ...     def score(self, tokens, offsets):
    ...         return ((tokens >= 48) & (tokens <= 57)).float()
    >>> (Digit() * 2.0)(torch.tensor([65, 49]))
    tensor([0., 2.])
    """

    #: The score at t reads tokens t-R..t and nothing else; None if there is no such R.
    receptive_field: int | None

    @abstractmethod
    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return scores [T]; ``offsets`` [T] counts the tokens before each in its sequence."""

    def check(self, tokens: object) -> Tensor:
        """Return the input if it is of the right dtype and rank, else raise."""
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens: expected a tensor, got {describe(tokens)}")
        return tokens

    def __call__(self, tokens: Tensor, cu_seqlens: SequenceOffsets | None = None) -> Tensor:
        """Score packed sequences.

        Parameters
        ----------
        tokens : tensor [T, ...]
        cu_seqlens : offsets [B+1], optional
            Default: one sequence.

        Returns
        -------
        floating tensor [T]
        """
        tokens = self.check(tokens)
        total = len(tokens)
        cu = as_cu_seqlens(total if cu_seqlens is None else cu_seqlens, tokens.device, total=total)
        begin = torch.repeat_interleave(cu[:-1], cu.diff(), output_size=total)
        return self.score(tokens, torch.arange(total, device=tokens.device) - begin)

    def __add__(self, other: Score) -> WeightedSum:
        return WeightedSum(_terms(self) + _terms(other))

    def __mul__(self, weight: float) -> WeightedSum:
        return WeightedSum([(weight * w, score) for w, score in _terms(self)])

    __rmul__ = __mul__


class WeightedSum(Score):
    """Sum of scorers that read the same tokens; its reach is the farthest of theirs.

    Examples
    --------
    >>> from dynchunk.boundaries import HashScore
    >>> (HashScore(2) + 0.1 * HashScore(5)).receptive_field
    4
    """

    def __init__(self, terms: list[tuple[float, Score]]) -> None:
        self.terms = terms
        reaches = [score.receptive_field for _, score in terms]
        known = [reach for reach in reaches if reach is not None]
        self.receptive_field = max(known) if len(known) == len(reaches) else None

    def check(self, tokens: object) -> Tensor:
        """Return the input if every term takes it."""
        checked = [score.check(tokens) for _, score in self.terms]
        return checked[0]

    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return the weighted sum, in the order of the terms."""
        (weight, first), *rest = self.terms
        total = weight * first.score(tokens, offsets)
        for weight, score in rest:
            total = total + weight * score.score(tokens, offsets)
        return total


def _terms(score: Score) -> list[tuple[float, Score]]:
    return score.terms if isinstance(score, WeightedSum) else [(1.0, score)]
