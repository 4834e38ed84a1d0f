"""Rotary positions on the trailing channels of a head, in neighbouring pairs, any position."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk.attention.specs import Rope, Yarn


def frequencies(
    rope: Rope,
    head_dim: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the angle per token of each rotating pair, [pairs].

    Examples
    --------
    >>> frequencies(Rope(theta=100.0), 4)
    tensor([1.0000, 0.1000])
    """
    dims = rope.dims(head_dim)
    exponent = torch.arange(0, dims, 2, device=device, dtype=dtype) / dims
    plain = 1.0 / rope.theta**exponent
    return plain if rope.yarn is None else _interpolate(plain, rope.yarn, rope.theta)


class Rotation(NamedTuple):
    """What turns the last channels of whatever lies at some positions, and back.

    :meth:`of` makes it from positions; without a ``Rope`` everything stays as it is.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0]])
    >>> rotation = Rotation.of(torch.tensor([3]), Rope(), 2, x.dtype)
    >>> torch.allclose(rotation.turn_back(rotation.turn(x)), x)
    True
    """

    cos: Tensor | None  #: of each position and pair, [T, pairs]
    sin: Tensor | None

    @classmethod
    def of(cls, position: Tensor, rope: Rope | None, head_dim: int, dtype: torch.dtype) -> Rotation:
        """Return the rotation by positions [T], for tensors of a dtype and so many channels."""
        if rope is None:
            return cls(None, None)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        speed = frequencies(rope, head_dim, position.device, wide)
        angle = position.to(wide)[:, None] * speed
        return cls(angle.cos(), angle.sin())

    def turn(self, x: Tensor) -> Tensor:
        """Turn x [T, .., D]."""
        return self._turned(x, 1)

    def turn_back(self, x: Tensor) -> Tensor:
        """Turn x [T, .., D] back: the output of an attention whose keys are its values."""
        return self._turned(x, -1)

    def _turned(self, x: Tensor, direction: int) -> Tensor:
        if self.cos is None or self.sin is None:
            return x
        shape = len(self.cos), *[1] * (x.ndim - 2), self.cos.shape[1]
        cos, sin = self.cos.reshape(shape), self.sin.reshape(shape) * direction
        first = x.shape[-1] - 2 * cos.shape[-1]
        still, turning = x[..., :first], x[..., first:].to(cos.dtype)
        even, odd = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        return torch.cat([still, turned.to(x.dtype)], -1)


def rotate(x: Tensor, position: Tensor, rope: Rope | None) -> Tensor:
    """Rotate the last channels of ``x`` by the angles of its positions.

    Parameters
    ----------
    x : floating tensor [T, .., D]
    position : integer tensor [T]
    rope : Rope or None
        None: ``x`` as it is.

    Returns
    -------
    tensor like ``x``
        Computed in float32, in float64 for such an ``x``.

    Examples
    --------
    >>> rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([3]), Rope())
    tensor([[-0.9900,  0.1411]])
    """
    return Rotation.of(position, rope, x.shape[-1], x.dtype).turn(x)


def _interpolate(plain: Tensor, yarn: Yarn, theta: float) -> Tensor:
    """Slow pairs turn ``factor`` times slower, fast ones as before, those between in a ramp."""
    pairs = len(plain)

    def pair_with(turns: float) -> float:
        per_turn = yarn.original / (turns * 2 * math.pi)
        return pairs * math.log(per_turn) / math.log(theta)

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), 2 * pairs - 1)
    index = torch.arange(pairs, device=plain.device, dtype=plain.dtype)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)
