"""What may follow the pooling of an entry: RMSNorm, then RoPE."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return the factors of an RMSNorm over the last dimension."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def norm_backward(grad: Tensor, x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [N, H, D] and of the weights norm [D] of an RMSNorm."""
    scale = inverse_rms(x, eps)
    of_norm = (grad * x * scale).sum((0, 1)).to(norm.dtype)
    grad = grad * norm
    return scale * (grad - x * scale.square() * (grad * x).mean(-1, keepdim=True)), of_norm


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last pairs of neighbouring channels of x [N, H, D] by angles [N, P]."""
    cos, sin = (angles[:, None].to(x.dtype) for angles in (cos, sin))
    first = x.shape[-1] - 2 * cos.shape[-1]
    still, turning = x[..., :first], x[..., first:]
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat([still, turned], -1)
