"""Hash of the last tokens: content-defined boundaries that know nothing of the content."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk._checks import require_int, require_tokens
from dynchunk.boundaries.scores.base import Score

# 64-bit constants as signed integers: the finaliser of splitmix64 (Steele, Lea and Flood 2014).
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


class HashScore(Score):
    """Pseudo-random score in [0, 1) from the last ``n`` token ids.

    No training, any model: equal text gives equal scores on every device, and ties are rare
    (2^-24). What it puts together is arbitrary, so a small multiple of it is best used to break the
    ties of a score that knows the content.

    Parameters
    ----------
    n : int >= 1
        Token ids read, the current one included; ``receptive_field`` = n - 1.
    seed : int
        Another seed, another score.

    Examples
    --------
    >>> tokens = torch.tensor([5, 6, 7, 5, 6, 7])
    >>> scores = HashScore(2)(tokens)
    >>> bool(scores[1] == scores[4]), bool(scores[0] == scores[3])
    (True, False)
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = require_int("n", n, 1)
        self.seed = require_int("seed", seed)
        self.receptive_field = n - 1

    def check(self, tokens: object) -> Tensor:
        """Return integer token ids [T]."""
        return require_tokens("tokens", tokens)

    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return float32 scores [T]."""
        top = _logical_shift(hash_last(tokens, offsets, self.n, self.seed), 40)
        return top.float() * 2.0**-24  # 24 bits: exact in float32


def hash_last(tokens: Tensor, offsets: Tensor, n: int, seed: int = 0) -> Tensor:
    """Hash the last ``n`` token ids of every position, int64 [T]; fewer at a sequence's start."""
    ids = tokens.to(torch.int64)
    state = torch.full_like(ids, seed)
    for back in reversed(range(n)):
        # Tokens before the sequence hash as -1, which is no token id.
        seen = torch.where(offsets >= back, ids.roll(back), -1)
        state = _mix(state + _GOLDEN + seen)
    return state


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX1
    x = (x ^ _logical_shift(x, 27)) * _MIX2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
