"""Rotary positions on the trailing channels of a head, in neighbouring pairs, any position."""

from __future__ import annotations

import math

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


def rotate(x: Tensor, position: Tensor, rope: Rope | None, *, inverse: bool = False) -> Tensor:
    """Rotate the last channels of ``x`` by the angles of its positions.

    Parameters
    ----------
    x : floating tensor [T, .., D]
    position : integer tensor [T]
    rope : Rope or None
        None: ``x`` as it is.
    inverse : bool
        Rotate back: on the output of an attention whose keys are its values.

    Returns
    -------
    tensor like ``x``
        Computed in float32, in float64 for such an ``x``.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0]])
    >>> y = rotate(x, torch.tensor([3]), Rope())
    >>> torch.allclose(rotate(y, torch.tensor([3]), Rope(), inverse=True), x)
    True
    """
    if rope is None:
        return x
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    speed = frequencies(rope, x.shape[-1], x.device, wide)
    angle = position.to(wide)[:, None] * (-speed if inverse else speed)
    angle = angle.reshape(len(position), *[1] * (x.ndim - 2), len(speed))
    cos, sin = angle.cos(), angle.sin()
    still, turning = x[..., : -2 * len(speed)], x[..., -2 * len(speed) :].to(wide)
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat([still, turned.to(x.dtype)], -1)


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
