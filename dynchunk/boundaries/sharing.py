"""Boundaries across layers: who computes them, and how well layers would have agreed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk._checks import require, require_int
from dynchunk.chunks import Chunks


@dataclass(frozen=True, slots=True)
class SharePlan:
    """Which layer's boundaries each layer uses.

    Parameters
    ----------
    leaders : tuple of int [L]
        The layer whose boundaries layer l uses: itself or an earlier one, which leads itself.

    Examples
    --------
    >>> SharePlan.anchors(7, every=3).leaders
    (0, 0, 0, 3, 3, 3, 6)
    """

    leaders: tuple[int, ...]

    def __post_init__(self) -> None:
        for layer, leader in enumerate(self.leaders):
            require_int(f"leaders[{layer}]", leader, 0)
            ok = leader <= layer and self.leaders[leader] == leader
            require(ok, f"leaders[{layer}]", "itself or an earlier layer that leads itself", leader)

    @classmethod
    def every_layer(cls, layers: int) -> SharePlan:
        """Each layer has boundaries of its own."""
        return cls.anchors(layers, every=1)

    @classmethod
    def all_from_one(cls, layers: int) -> SharePlan:
        """All layers use the first one's: the default, since a shallow score has a short reach."""
        return cls((0,) * require_int("layers", layers, 1))

    @classmethod
    def anchors(cls, layers: int, every: int) -> SharePlan:
        """Layers 0, every, 2 every, .. have their own; those between use the last of these."""
        require_int("every", every, 1)
        return cls(tuple(i - i % every for i in range(require_int("layers", layers, 1))))

    @property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """The layers that follow each leader, itself included."""
        return {
            leader: tuple(i for i, other in enumerate(self.leaders) if other == leader)
            for leader in sorted(set(self.leaders))
        }

    def share(self, segment: Callable[[int], Chunks]) -> list[Chunks]:
        """Return the chunks of every layer, calling ``segment(layer)`` once per leader.

        Examples
        --------
        >>> layers = SharePlan.all_from_one(3).share(lambda layer: Chunks.fixed(4, 8))
        >>> layers[0] is layers[2]
        True
        """
        of_leader = {leader: segment(leader) for leader in self.groups}
        return [of_leader[leader] for leader in self.leaders]


class Agreement(NamedTuple):
    """How well two sets of boundaries agree, each figure beside its value by chance."""

    jaccard: float
    jaccard_chance: float
    f1: float
    f1_chance: float


def agreement(a: Chunks, b: Chunks, tolerance: int = 1) -> Agreement:
    """Compare two segmentations of the same tokens.

    First tokens of sequences, on which all agree, are left out. Jaccard counts equal positions; F1
    is the harmonic mean of the share of a's boundaries with one of b's within ``tolerance`` tokens
    in the same sequence, and the reverse. Chance levels are those of boundaries put independently
    at the same rates: pq / (p + q - pq) for Jaccard, 1 - (1 - q)^(2 tolerance + 1) for a share.

    Parameters
    ----------
    a, b : Chunks
    tolerance : int >= 0

    Returns
    -------
    Agreement
        NaN where neither has a boundary.

    Examples
    --------
    >>> a, b = Chunks.from_boundaries([4, 9], 20), Chunks.from_boundaries([5, 9], 20)
    >>> [round(value, 3) for value in agreement(a, b)]
    [0.333, 0.056, 1.0, 0.284]
    """
    require_int("tolerance", tolerance, 0)
    same = torch.equal(a.cu_seqlens, b.cu_seqlens)
    require(same, "b", f"the sequences of a, {a.cu_seqlens.tolist()}", b.cu_seqlens.tolist())
    at_a, at_b = (_inner_boundaries(chunks, tolerance) for chunks in (a, b))
    places = int((a.cu_seqlens.diff() - 1).clamp(min=0).sum())
    if len(at_a) + len(at_b) == 0:
        return Agreement(*(float("nan"),) * 4)
    common = int(torch.isin(at_a, at_b).sum())
    jaccard = common / (len(at_a) + len(at_b) - common)
    p, q = len(at_a) / places, len(at_b) / places
    width = 2 * tolerance + 1
    return Agreement(
        jaccard,
        p * q / (p + q - p * q),
        _f1(_share_near(at_a, at_b, tolerance), _share_near(at_b, at_a, tolerance)),
        _f1(1 - (1 - q) ** width, 1 - (1 - p) ** width),
    )


def _inner_boundaries(chunks: Chunks, gap: int) -> Tensor:
    """Boundaries inside sequences, these moved apart by ``gap`` more tokens each."""
    inner = ~torch.isin(chunks.starts, chunks.cu_seqlens)
    return chunks.starts[inner] + (gap + 1) * chunks.sequence_ids[inner]


def _share_near(a: Tensor, b: Tensor, tolerance: int) -> float:
    """Share of a's positions with one of b's within ``tolerance``; 0 where a or b is empty."""
    if len(a) == 0:
        return 0.0
    near = torch.searchsorted(b, a + tolerance, right=True) > torch.searchsorted(b, a - tolerance)
    return float(near.double().mean())


def _f1(precision: float, recall: float) -> float:
    total = precision + recall
    return 2 * precision * recall / total if total else 0.0
