"""The policy of a layer: boundaries x reduction x selection, a raw window and a sink."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dynchunk._checks import describe, require, require_choice, require_int
from dynchunk.attention import specs
from dynchunk.attention.specs import (
    All,
    AsScored,
    Evict,
    GatedPool,
    MeanPool,
    Midpoints,
    Quest,
    Raw,
    Reduction,
    Rope,
    ScoreSpec,
    Selection,
    Shifted,
    TopK,
    View,
    Yarn,
)
from dynchunk.boundaries import BoundaryRule, FixedStride, Rule
from dynchunk.chunks import Chunks
from dynchunk.ops.layout import COVERS

#: Version of the dictionaries that :meth:`Policy.as_dict` writes.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """How one attention layer compresses its keys and values, and what its queries read.

    A boundary is the FIRST token of a chunk.

    Parameters
    ----------
    boundaries : BoundaryRule, FixedStride or None
        What turns scores into chunks. None: no chunks, full or sliding attention.
    score : Hash, TokenClasses, Learned, Router or None
        What scores the tokens, for a ``BoundaryRule``. None: the caller gives scores or chunks.
    views : tuple of AsScored, Shifted, Midpoints, Rescored
        G views of the chunks. KV heads are split over them in order; a number of KV heads that G
        does not divide is split by channels: each head becomes G heads of 1 / G of the channels.
    reduction : GatedPool, MeanPool, Raw or Evict
        What a chunk leaves. ``Raw`` and ``Evict`` need no training: they are for models that were
        trained with full attention, with one view and ``cover="tail"``.
    selection : All, TopK or Quest
        Which visible entries a query reads; ``Quest``: which raw chunks.
    window : int >= 0 or None
        Raw tokens that a query reads, itself included. None: all before it.
    cover : {"window", "tail"}
        As in :class:`~dynchunk.ops.layout.Reads`.
    sink : bool
        A learnable logit per head without a value.
    rope : Rope or None
        Rotary positions of queries, raw keys, and entries (at their chunk's first token).
    allow_unseen : bool
        Accept a window in which a token may be neither raw nor part of a visible entry.

    Examples
    --------
    >>> policy = Policy(FixedStride(4), views=(AsScored(), Shifted(2)), window=12)
    >>> policy.min_window, Policy.from_dict(policy.as_dict()) == policy
    (4, True)
    """

    boundaries: Rule | None = None
    score: ScoreSpec | None = None
    views: tuple[View, ...] = (AsScored(),)
    reduction: Reduction = GatedPool()
    selection: Selection = All()
    window: int | None = 128
    cover: str = "window"
    sink: bool = True
    rope: Rope | None = Rope()
    allow_unseen: bool = False

    def __post_init__(self) -> None:
        for name, kinds in _FIELDS.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not isinstance(value, kinds):
                choices = ", ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name}: expected one of {choices}, got {describe(value)}")
        for view in self.views:
            if not isinstance(view, specs.View):
                raise TypeError(f"views: expected views of chunks, got {describe(view)}")
        require(len(self.views) > 0, "views", "at least one view", self.views)
        require_choice("cover", self.cover, COVERS)
        if self.window is not None:
            require_int("window", self.window, 0)
        if self.boundaries is None:
            require(self.score is None, "score", "None without boundaries", self.score)
            require(len(self.views) == 1, "views", "one without boundaries", self.views)
        elif isinstance(self.boundaries, FixedStride):
            rescored = [view for view in self.views if isinstance(view, specs.Rescored)]
            require(self.score is None, "score", "None for a fixed stride", self.score)
            require(not rescored, "views", "no other score for a fixed stride", rescored)
        self._check_raw_chunks()
        if self.boundaries is not None and self.window is not None and self.cover == "window":
            expected = f"at least {self.min_window} (every token raw until its entry is readable)"
            is_seen = self.allow_unseen or self.window >= self.min_window
            require(is_seen, "window", expected, self.window)

    def _check_raw_chunks(self) -> None:
        kind = type(self.reduction).__name__
        if isinstance(self.selection, Quest):
            require(isinstance(self.reduction, Raw), "reduction", "Raw() with Quest", kind)
        if not self.keeps_raw_chunks:
            return
        require(self.boundaries is not None, "boundaries", f"a rule with {kind}", None)
        require(len(self.views) == 1, "views", f"one with {kind}", self.views)
        require(self.window is not None, "window", f"an integer >= 0 with {kind}", None)
        require(self.cover == "tail", "cover", f"'tail' with {kind}", self.cover)
        read = (All, Quest) if isinstance(self.reduction, Raw) else (All,)
        names = " or ".join(one.__name__ for one in read)
        fits = isinstance(self.selection, read)
        require(fits, "selection", f"{names} with {kind}", self.selection)

    @property
    def keeps_raw_chunks(self) -> bool:
        """Whether what a chunk leaves are raw tokens, all or some, and no new entry."""
        return isinstance(self.reduction, Raw | Evict)

    @property
    def min_window(self) -> int:
        """Raw tokens that leave no token unseen: until its entry can be read, in every view."""
        if self.boundaries is None:
            return 0
        return max(_min_window(self.boundaries, view) for view in self.views)

    @property
    def max_length(self) -> int:
        """Length of the longest chunk before views: rows of the slot bias."""
        if isinstance(self.boundaries, BoundaryRule):
            return self.boundaries.max_length
        return 1 if self.boundaries is None else self.boundaries.stride

    def view(self, chunks: Chunks, index: int) -> Chunks:
        """Return view ``index`` of the chunks that it comes from."""
        view = self.views[index]
        if isinstance(view, Shifted):
            return chunks.shifted(view.k)
        return chunks.midpoints() if isinstance(view, Midpoints) else chunks

    def as_dict(self) -> dict[str, Any]:
        """Return the policy as JSON can hold it."""
        return {"version": VERSION, **specs.encode(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Policy:
        """Return the policy that :meth:`as_dict` wrote.

        Raises
        ------
        ValueError
            Another version, an unknown name, a value out of range.
        """
        require(isinstance(data, dict), "policy", "a dict", data)
        version = data.get("version")
        require(version == VERSION, "policy version", str(VERSION), version)
        given = {key: value for key, value in data.items() if key != "version"}
        policy = specs.decode("policy", given, KINDS)
        require(isinstance(policy, cls), "policy: kind", "'Policy'", data.get("kind"))
        return policy  # type: ignore[no-any-return]


def _min_window(rule: Rule, view: View) -> int:
    length = rule.stride if isinstance(rule, FixedStride) else rule.max_length
    plain = rule.stride if isinstance(rule, FixedStride) else rule.min_window
    if isinstance(view, Shifted):
        return max(plain + max(0, -view.k), view.k)
    return plain + (length + 1) // 2 if isinstance(view, Midpoints) else plain


_OPTIONAL = ("boundaries", "score", "rope")
_FIELDS: dict[str, tuple[type, ...]] = {
    "boundaries": (BoundaryRule, FixedStride),
    "score": (specs.Hash, specs.TokenClasses, specs.Learned, specs.Router),
    "views": (tuple,),
    "reduction": (GatedPool, MeanPool, Raw, Evict),
    "selection": (All, TopK, Quest),
    "rope": (Rope,),
}

#: The classes that a policy's dictionary may name.
KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Policy,
        *_FIELDS["boundaries"],
        *_FIELDS["score"],
        *(AsScored, Shifted, Midpoints, specs.Rescored),
        *_FIELDS["reduction"],
        *_FIELDS["selection"],
        Rope,
        Yarn,
    )
}

_COMPRESSED = Rope(fraction=64 / 512, theta=160_000.0, yarn=Yarn())


def full(rope: Rope | None = Rope()) -> Policy:
    """Full attention: every raw token.

    >>> full().window is None
    True
    """
    return Policy(window=None, sink=False, rope=rope)


def sliding(window: int = 128) -> Policy:
    """DeepSeek V4's layers without entries: the last raw tokens and a sink.

    >>> sliding().rope.theta
    10000.0
    """
    return Policy(window=window, rope=Rope(fraction=64 / 512))


def csa() -> Policy:
    """DeepSeek V4's compressed sparse attention: 4 tokens an entry, overlap, top 512.

    >>> csa().boundaries
    FixedStride(stride=4, offset=0)
    """
    return Policy(
        FixedStride(4), reduction=GatedPool(overlap=True), selection=TopK(512), rope=_COMPRESSED
    )


def hca() -> Policy:
    """DeepSeek V4's heavily compressed attention: 128 tokens an entry, all of them read.

    >>> hca().selection
    All()
    """
    return Policy(FixedStride(128), rope=_COMPRESSED)


def csa2() -> Policy:
    """DeepSeek V4.1's attention: 2 tokens an entry, a gate without slot bias, top 512 of 32 heads.

    >>> csa2().reduction
    GatedPool(slot_bias=False, overlap=False, norm=True)
    """
    return replace(
        csa(),
        boundaries=FixedStride(2),
        reduction=GatedPool(slot_bias=False),
        selection=TopK(512, heads=32),
    )


def quest(
    boundaries: Rule,
    score: ScoreSpec | None = None,
    *,
    share: float = 0.125,
    window: int = 64,
) -> Policy:
    """Full attention of which each decode step reads a share (Tang et al., arXiv 2406.10774).

    >>> quest(FixedStride(4)).selection
    Quest(share=0.125, k=None, first=4, normalise=True)
    """
    return Policy(
        boundaries,
        score,
        reduction=Raw(),
        selection=Quest(share),
        window=window,
        cover="tail",
        sink=False,
        rope=None,
    )


def chunk_kv(
    boundaries: Rule,
    score: ScoreSpec | None = None,
    *,
    ratio: float = 4.0,
    window: int = 64,
) -> Policy:
    """Full attention of which whole chunks are evicted (ChunkKV: Liu et al., arXiv 2502.00299).

    >>> chunk_kv(FixedStride(8)).reduction
    Evict(ratio=4.0, observe=32, first=4, per_token=True)
    """
    return Policy(
        boundaries,
        score,
        reduction=Evict(ratio),
        window=window,
        cover="tail",
        sink=False,
        rope=None,
    )
