"""What a policy is made of: small frozen specifications, written to and read from dictionaries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from dynchunk._checks import require, require_choice, require_int

#: How a learned score gets a gradient: not at all, log p of the boundary as a bias of its entry's
#: logit, or the gradient of that bias without its value.
CREDITS = ("none", "log_p", "straight_through")


# What scores the tokens


@dataclass(frozen=True, slots=True)
class Hash:
    """Hash of the last ``n`` token ids: :class:`~dynchunk.boundaries.HashScore`."""

    n: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n", self.n, 1)
        require_int("seed", self.seed)


@dataclass(frozen=True, slots=True)
class TokenClasses:
    """1 for the token ids that start something, 0 for all others; use a threshold of 0.5."""

    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        for token in self.starts:
            require_int("starts", token, 0)


@dataclass(frozen=True, slots=True)
class Learned:
    """A learned linear function of a token's normalised hidden state and the ``reach`` before it.

    For local maxima: ``credit="log_p"`` gives it a gradient through the logits of the entries.
    """

    reach: int = 1
    credit: str = "log_p"

    def __post_init__(self) -> None:
        require_int("reach", self.reach, 0)
        require_choice("credit", self.credit, CREDITS)


@dataclass(frozen=True, slots=True)
class Router:
    """H-Net's router: :class:`~dynchunk.boundaries.SimilarityScore`, trained to ``ratio``."""

    ratio: float = 4.0
    credit: str = "log_p"

    def __post_init__(self) -> None:
        require(self.ratio > 1, "ratio", "a number > 1", self.ratio)
        require_choice("credit", self.credit, CREDITS)


ScoreSpec = Hash | TokenClasses | Learned | Router


# Views of one segmentation, one per group of KV heads


@dataclass(frozen=True, slots=True)
class AsScored:
    """The chunks as they are."""


@dataclass(frozen=True, slots=True)
class Shifted:
    """Every boundary moved by ``k`` tokens; on a fixed grid the staggered one."""

    k: int

    def __post_init__(self) -> None:
        require_int("k", self.k)


@dataclass(frozen=True, slots=True)
class Midpoints:
    """Cut in the middle of every chunk."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """The same rule on another score."""

    score: ScoreSpec


View = AsScored | Shifted | Midpoints | Rescored


# What a chunk leaves, and what a query reads of it


@dataclass(frozen=True, slots=True)
class MeanPool:
    """The mean of keys and values.

    Parameters
    ----------
    own : bool
        Of projections of its own; else of the raw keys (before RoPE) and values.
    norm : bool
        RMSNorm of the entry's key.
    log_length : bool
        Add the log of the chunk's length to the logit: an entry weighs as much as its tokens.
    """

    own: bool = False
    norm: bool = False
    log_length: bool = True


@dataclass(frozen=True, slots=True)
class GatedPool:
    """A softmax over the chunk's tokens for each channel, as in DeepSeek V4.

    Parameters
    ----------
    slot_bias : bool
        Add a learned row per slot to the gate.
    overlap : bool
        Pool also a second series of the chunk before.
    norm : bool
        RMSNorm of the entry's key.
    """

    slot_bias: bool = True
    overlap: bool = False
    norm: bool = True


@dataclass(frozen=True, slots=True)
class Raw:
    """Its raw tokens: nothing is lost, and a selection says which of them a query reads."""


@dataclass(frozen=True, slots=True)
class Evict:
    """All of its raw tokens or none: :mod:`dynchunk.reduction.evict`.

    Each KV head of each layer keeps the chunks to which the last queries attended most, as many
    tokens in each of them. More than a few new tokens at once (16) are a part of a prompt: nothing
    is evicted, attention is exact. The first few tokens after that begin with an eviction, so that
    it does not matter how a prompt is split; a prompt that comes token by token counts as
    generated.

    Parameters
    ----------
    ratio : float >= 1
        Of the tokens before the window, and after the first ones, 1 in ``ratio`` is kept.
    observe : int >= 1
        How many of the last queries score the chunks. While tokens are generated, chunks are
        evicted again after so many tokens.
    first : int >= 0
        A chunk that has one of so many first tokens is never evicted (attention sinks: Xiao et al.,
        arXiv 2309.17453).
    per_token : bool
        A chunk's score is divided by its tokens: what it is worth for what it costs.
    """

    ratio: float = 4.0
    observe: int = 32
    first: int = 4
    per_token: bool = True

    def __post_init__(self) -> None:
        require(1 <= self.ratio < math.inf, "ratio", "a finite number >= 1", self.ratio)
        require_int("observe", self.observe, 1)
        require_int("first", self.first, 0)


Reduction = MeanPool | GatedPool | Raw | Evict


@dataclass(frozen=True, slots=True)
class All:
    """A query reads all visible entries."""


@dataclass(frozen=True, slots=True)
class TopK:
    """A query reads the ``k`` entries that a lightning indexer scores highest."""

    k: int
    heads: int = 64
    dim: int = 128

    def __post_init__(self) -> None:
        require_int("k", self.k, 0)
        require_int("heads", self.heads, 1)
        require_int("dim", self.dim, 1)


@dataclass(frozen=True, slots=True)
class Quest:
    """Each query head reads the raw tokens of the chunks with the highest bounds on their logits.

    The scores are those of :mod:`dynchunk.selection.quest`. More than a few new tokens at once (16)
    are a part of a prompt, whose attention is exact.

    Parameters
    ----------
    share : float in (0, 1], or None
        Of the tokens before the window, and after the first ones, that a query head reads.
    k : int >= 0, or None
        So many tokens instead, however long the context is; then ``share`` is None.
    first : int >= 0
        Tokens at the start of the sequence that every query reads (attention sinks).
    normalise : bool
        Take the bound's dependence on the chunk's length away.
    """

    share: float | None = 0.125
    k: int | None = None
    first: int = 4
    normalise: bool = True

    def __post_init__(self) -> None:
        one = (self.share is None) != (self.k is None)
        require(one, "share, k", "one of them, the other None", (self.share, self.k))
        if self.share is not None:
            require(0 < self.share <= 1, "share", "a number in (0, 1], or None", self.share)
        if self.k is not None:
            require_int("k", self.k, 0)
        require_int("first", self.first, 0)

    def budget(self, far: int) -> int:
        """Return how many of ``far`` tokens a query head reads."""
        if self.k is not None:
            return min(far, self.k)
        return int(far * (self.share or 0))


Selection = All | TopK | Quest


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's interpolation of RoPE frequencies (Peng et al., arXiv 2309.00071)."""

    factor: float = 16.0
    original: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions on the trailing ``fraction`` of a head's channels, in neighbouring pairs."""

    fraction: float = 1.0
    theta: float = 10_000.0
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1, "fraction", "a number in (0, 1]", self.fraction)
        require(self.theta > 0, "theta", "a number > 0", self.theta)

    def dims(self, head_dim: int) -> int:
        """Return how many of a head's channels rotate: an even number."""
        dims = int(head_dim * self.fraction + 1e-9)
        require(dims % 2 == 0 and dims > 0, "rope", "an even number of channels", dims)
        return dims

    def for_index(self, head_dim: int, index_dim: int) -> Rope:
        """Return the same rotation for an indexer: as many channels, as far as it has them."""
        return replace(self, fraction=min(self.dims(head_dim), index_dim) / index_dim)


# Dictionaries


def encode(value: Any) -> Any:
    """Return what JSON can hold; a specification becomes a dict with its class as ``kind``."""
    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__} | items
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value


def decode(argument: str, data: Any, kinds: Mapping[str, type]) -> Any:
    """Return what :func:`encode` was given; ``kinds`` are the classes that may occur."""
    if isinstance(data, dict):
        name = data.get("kind")
        require_choice(f"{argument}: kind", name, tuple(kinds))
        kind = kinds[str(name)]
        known = tuple(field.name for field in fields(kind))
        given = {key: value for key, value in data.items() if key != "kind"}
        for key in given:
            require_choice(f"{argument}: field of {name}", key, known)
        try:
            return kind(**{key: decode(key, value, kinds) for key, value in given.items()})
        except TypeError as error:
            raise ValueError(f"{argument}: {name}: {error}") from error
    if isinstance(data, list):
        return tuple(decode(argument, item, kinds) for item in data)
    return float(data) if data in ("inf", "-inf") else data
