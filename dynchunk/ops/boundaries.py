"""The boundary rule: scores to chunk starts, with the time at which each start is known.

Parameters everywhere: radius w >= 0, threshold tau, min_length m >= 1, max_length M, with
w >= m - 1 and M >= 2m - 1. A sequence of n tokens is known up to token n - 1.

*Maximum of radius w* at t >= 1: ``s[t] >= tau``, ``s[t] > s[u]`` for u in [t-w, t-1] of the
sequence, ``s[t] >= s[u]`` for u in [t+1, t+w]. Two of them are more than w apart.

*Content boundary*: a maximum of radius w, known when token t + lag has arrived, lag = w. With the
ladder (two radii): also a maximum of radius m - 1 that lies in a gap of more than M tokens between
neighbouring maxima of radius w (the first token counts as one), at least m away from both; then
lag = w + M - m for all.

*Forced cuts*: from a boundary a, at q = a + M, a + 2M, .. before the next content boundary c; one
with c - q < m moves back to c - m. A cut at q is known when token q + m - 1 + lag has arrived, one
that moved back when c is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk._checks import require, require_choice

IMPLS = (None, "cpu", "reference", "triton")
_DEFAULTS = {"cpu": "cpu", "cuda": "triton"}


class RuleParameters(NamedTuple):
    """What the rule needs to know, in the order in which the implementations take it."""

    radius: int
    threshold: float
    min_length: int
    max_length: int
    ladder: bool

    @property
    def lag(self) -> int:
        """Tokens after a content boundary until it is known."""
        return self.radius + (self.max_length - self.min_length if self.ladder else 0)


class BoundaryArrays(NamedTuple):
    """Result of :func:`boundaries`, sorted by position."""

    starts: Tensor  #: int64 [N], the first tokens of the chunks
    visible_from: Tensor  #: int64 [N], when each chunk is closed, or ``NEVER``
    kinds: Tensor  #: int8 [N], a ``Kind`` each


def boundaries(
    scores: Tensor, cu_seqlens: Tensor, parameters: RuleParameters, impl: str | None = None
) -> BoundaryArrays:
    """Apply the rule to packed scores.

    Parameters
    ----------
    scores : floating tensor [T]
        Without NaN; infinities are ordinary values.
    cu_seqlens : int64 tensor [B+1]
        On the device of ``scores``.
    parameters : RuleParameters
    impl : {None, "cpu", "reference", "triton"}

    Raises
    ------
    ValueError
        On NaN, naming the first one; on an ``impl`` that cannot run on the device.
    """
    require_choice("impl", impl, IMPLS)
    if impl is None:
        impl = _DEFAULTS.get(scores.device.type, "reference")
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()  # exact for the 16- and 8-bit formats
    scores = scores.detach()
    arrays: tuple[Tensor, ...] | None
    if impl == "cpu":
        require(scores.device.type == "cpu", "impl", "'reference' on this device", impl)
        from dynchunk.ops.cpu import boundaries as cpu

        found = cpu.boundaries(scores.numpy(), cu_seqlens.numpy(), parameters)
        arrays = None if found is None else tuple(map(torch.from_numpy, found))
    else:
        from dynchunk.ops.reference.boundaries import boundaries as by_torch

        maxima = _triton_maxima(scores) if impl == "triton" else None
        arrays = by_torch(scores, cu_seqlens, parameters, maxima)
    if arrays is None:
        first = int(scores.isnan().nonzero()[0])
        raise ValueError(f"scores: expected numbers, got NaN at token {first}")
    return BoundaryArrays(*arrays)


def _triton_maxima(scores: Tensor) -> Callable[[Tensor, Tensor, int], Tensor]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    ok = scores.device.type == "cuda" or interpreted
    require(ok, "impl", "'cpu' or 'reference' for tensors that are not on a GPU", "triton")
    from dynchunk_kernels.boundaries import maxima

    return maxima
