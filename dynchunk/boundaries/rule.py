"""Rules: what turns scores into chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynchunk._checks import describe, require, require_int
from dynchunk.boundaries.stream import BoundaryStream, FixedStream
from dynchunk.chunks import Chunks, SequenceOffsets, as_cu_seqlens, cu_seqlens_from_mask
from dynchunk.ops.boundaries import RuleParameters, boundaries


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """Start a chunk at local maxima of the score, and keep chunk lengths within bounds.

    A token t >= 1 is a *content boundary* (the FIRST token of a chunk) if its score is at least
    ``threshold``, greater than the ``radius`` scores before it and not less than the ``radius``
    after. Where the next one is more than ``max_length`` away, *forced cuts* follow at
    ``max_length`` from the boundary before; one that would leave less than ``min_length`` moves
    back. What follows, for any scores:

    - every closed chunk has ``min_length`` to ``max_length`` tokens, the first one of a sequence
      excepted (1 to ``max_length``);
    - token by token gives the same boundaries as all at once, none is ever taken back, and each is
      known at most ``max_lag`` tokens after it;
    - two inputs that agree from token p on have the same content boundaries from
      p + ``locality`` + (the scorer's receptive field) on, and from the first of them on all the
      same boundaries. A prefix of any length therefore changes chunks only up to there.

    Parameters
    ----------
    radius : int >= min_length - 1
        Content boundaries are more than ``radius`` apart. On white scores they are 2 radius + 1
        apart on average.
    threshold : float
        Scores below it never start a chunk. -inf (default): the rule is ordinal. Where density
        should follow the content, use a threshold, a small radius and a large ``max_length``.
    min_length : int >= 1
    max_length : int >= 2 min_length - 1
        At least 4 radius keeps forced cuts under 5 % on white scores, correlated ones need 8.
    ladder : bool
        Look for maxima of the smaller radius ``min_length - 1`` where maxima of ``radius`` are more
        than ``max_length`` apart, before forcing cuts. Forced cuts become rare, confirmation takes
        ``max_length - min_length`` tokens longer.

    Notes
    -----
    With radius 0 and min_length 1 this is the plain threshold rule (H-Net, arXiv 2507.07955). The
    one-sided strictness of local maxima is that of Bjorner, Blass and Gurevich (JCSS 79, 2013). A
    run of equal scores has no content boundary: there, forced cuts count from the last one. (No
    rule of bounded context can do otherwise and bound lengths both ways.)

    Examples
    --------
    >>> rule = BoundaryRule(radius=1, min_length=2, max_length=4)
    >>> rule(torch.tensor([0.0, 1, 0, 0, 3, 1, 1, 1, 1, 1, 1, 1])).starts
    tensor([0, 1, 4, 8])
    """

    radius: int
    threshold: float = -math.inf
    min_length: int = 1
    max_length: int = 32
    ladder: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("radius", 0), ("min_length", 1), ("max_length", 1)):
            require_int(name, getattr(self, name), minimum)
        if not isinstance(self.threshold, int | float) or math.isnan(self.threshold):
            raise ValueError(f"threshold: expected a number, got {describe(self.threshold)}")
        m, M = self.min_length, self.max_length
        require(m <= M, "min_length", f"at most max_length = {M}", m)
        require(2 * m - 1 <= M, "max_length", f"at least 2 * min_length - 1 = {2 * m - 1}", M)
        require(self.radius >= m - 1, "radius", f"at least min_length - 1 = {m - 1}", self.radius)

    @property
    def parameters(self) -> RuleParameters:
        """The rule as :func:`dynchunk.ops.boundaries.boundaries` takes it."""
        return RuleParameters(
            self.radius, float(self.threshold), self.min_length, self.max_length, self.ladder
        )

    @property
    def lag(self) -> int:
        """Tokens after a content boundary until it is known."""
        return self.parameters.lag

    @property
    def max_lag(self) -> int:
        """Tokens after any boundary until it is known, at most.

        ``lag`` for content boundaries, min_length - 1 more for forced cuts, and one more again for
        a cut that moved back: it waits for the content boundary min_length after it.
        """
        return self.lag + (self.min_length if self.min_length > 1 else 0)

    @property
    def min_window(self) -> int:
        """Tokens from a chunk's first one until its entry can be read, at most.

        A raw window of that many tokens leaves no token unseen.
        """
        return self.max_length + self.lag + self.min_length - 1

    @property
    def locality(self) -> int:
        """How far before a token the input can change whether it is a content boundary.

        At least 1: the first token of a sequence is a boundary whatever its score.
        """
        return max(1, self.radius + (self.max_length if self.ladder else 0))

    def __call__(
        self,
        scores: Tensor,
        cu_seqlens: SequenceOffsets | None = None,
        *,
        mask: Tensor | None = None,
        impl: str | None = None,
    ) -> Chunks:
        """Cut sequences into chunks.

        Parameters
        ----------
        scores : floating tensor [T] or [B, T]
            One per token, high where a chunk would like to start; without NaN, infinities allowed.
            [B, T] is a batch, padded where ``mask`` says so; the result then refers to the packed
            tokens ``x[mask]``.
        cu_seqlens : offsets [B+1] of packed sequences, optional
            For scores [T]. Default: one sequence.
        mask : bool or 0/1 integer tensor [B, T], optional
            For scores [B, T]: True on real tokens, padding left or right. Default: no padding.
        impl : {None, "cpu", "reference", "triton"}
            numba on CPU tensors, vectorised torch on any device, or torch with a Triton kernel on
            a GPU; None picks by device.

        Returns
        -------
        Chunks
            On the device of ``scores``. The last chunk of each sequence is open.

        Raises
        ------
        TypeError, ValueError
            Scores that are no floating tensor, of another rank, or NaN; offsets that decrease or do
            not end at T; a mask that does not fit.
        """
        scores, cu = _pack_scores(scores, cu_seqlens, mask)
        return Chunks(cu, *boundaries(scores, cu, self.parameters, impl))

    def stream(self) -> BoundaryStream:
        """Return an empty stream of this rule for one sequence.

        Examples
        --------
        >>> stream = BoundaryRule(radius=1, max_length=4).stream()
        >>> stream.push(torch.tensor([0.0, 1.0, 0.0]))
        [Boundary(position=0, confirmed_at=0, kind=<Kind.START: 0>),
         Boundary(position=1, confirmed_at=2, kind=<Kind.CONTENT: 1>)]
        """
        return BoundaryStream(self.parameters)


@dataclass(frozen=True, slots=True)
class FixedStride:
    """Start a chunk every ``stride`` tokens: the grid of DeepSeek V4, NSA, MoBA and ChunkKV.

    A rule like any other, for comparison: it ignores the scores and counts tokens. A chunk is
    closed when its last token arrives.

    Parameters
    ----------
    stride : int >= 1
    offset : int in [0, stride)
        Position of the first grid line.

    Examples
    --------
    >>> FixedStride(4)(torch.zeros(10)).starts
    tensor([0, 4, 8])
    """

    stride: int
    offset: int = 0

    def __post_init__(self) -> None:
        require_int("stride", self.stride, 1)
        require_int("offset", self.offset, 0)
        require(
            self.offset < self.stride, "offset", f"less than stride = {self.stride}", self.offset
        )

    def __call__(
        self,
        scores: Tensor,
        cu_seqlens: SequenceOffsets | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Chunks:
        """Cut sequences into chunks; arguments as for :class:`BoundaryRule`."""
        _, cu = _pack_scores(scores, cu_seqlens, mask)
        return Chunks.fixed(self.stride, cu, self.offset)

    def stream(self) -> FixedStream:
        """Return an empty stream of this rule for one sequence."""
        return FixedStream(self.stride, self.offset)


Rule = BoundaryRule | FixedStride


def _pack_scores(
    scores: Tensor, cu_seqlens: SequenceOffsets | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Validate, and return packed scores [T] with their offsets [B+1]."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores: expected a floating tensor, got {describe(scores)}")
    shape = "[T] or [B, T]"
    require(scores.is_floating_point(), "scores", f"a floating tensor {shape}", scores)
    require(scores.ndim in (1, 2), "scores", f"a tensor of shape {shape}", scores)
    if scores.ndim == 1:
        require(mask is None, "mask", "None for packed scores [T]", mask)
        total = len(scores)
        cu = as_cu_seqlens(total if cu_seqlens is None else cu_seqlens, scores.device, total=total)
        return scores, cu
    require(cu_seqlens is None, "cu_seqlens", "None for scores [B, T] (use mask)", cu_seqlens)
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool)
    require(mask.shape == scores.shape, "mask", f"shape {list(scores.shape)}", mask)
    cu = cu_seqlens_from_mask(mask).to(scores.device)
    return scores[mask.to(scores.device).bool()], cu
