"""Scores of chunks from the box around their keys, for which nothing has to be trained.

A chunk's keys lie between their elementwise minimum and maximum, low and high. With the box's
centre c = (high + low) / 2 and half-ranges r = (high - low) / 2, no logit of a query q exceeds

    sum_d max(q_d low_d, q_d high_d)  =  q . c + sum_d |q_d| r_d        (Tang et al., arXiv
                                                                         2406.10774, section 3.2)

That adds up as if one token had the extreme of every channel at once, which is further from the
truth the more tokens there are: the half-ranges grow with a chunk's length, so that chunks of
different lengths cannot be compared and the long ones win. Channels that vary independently make
logits that are spread around q . c as the root of the sum of squares; so the normalised score is

    q . c + sqrt(sum_d (q_d r_d)^2)

which is no bound but an estimate of the highest logit. For a chunk of one token both are its logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk._checks import require


def chunk_bounds(k: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elementwise minimum and maximum of each chunk's keys.

    Parameters
    ----------
    k : floating tensor [T, H_kv, D]
        Keys after RoPE, chunk after chunk.
    lengths : int64 tensor [N]
        Tokens in each chunk, >= 1; T in all.

    Returns
    -------
    low, high : tensors [N, H_kv, D]

    Examples
    --------
    >>> k = torch.tensor([1.0, -2.0, 5.0]).reshape(3, 1, 1)
    >>> low, high = chunk_bounds(k, torch.tensor([2, 1]))
    >>> low.flatten(), high.flatten()
    (tensor([-2.,  5.]), tensor([1., 5.]))
    """
    flat = k.flatten(1).contiguous()
    low, high = (
        torch.segment_reduce(flat, kind, lengths=lengths, axis=0).reshape(-1, *k.shape[1:])
        for kind in ("min", "max")
    )
    return low, high


def quest_scores(
    q: Tensor, low: Tensor, high: Tensor, *, normalise: bool = True, scale: float | None = None
) -> Tensor:
    """Score chunks for each query head.

    Parameters
    ----------
    q : floating tensor [H, D]
        The heads of one query after RoPE; H_kv groups of neighbours share a KV head.
    low, high : floating tensors [N, H_kv, D]
        What :func:`chunk_bounds` returned.
    normalise : bool
        The estimate of the highest logit, which can be compared between chunks of different
        lengths; else Quest's bound on it.
    scale : float, optional
        Default: D^-1/2.

    Returns
    -------
    tensor [H, N], float32 at least

    Examples
    --------
    >>> q = torch.tensor([[3.0, 4.0]])
    >>> low, high = torch.tensor([[[-1.0, -1.0]]]), torch.tensor([[[1.0, 1.0]]])
    >>> quest_scores(q, low, high, normalise=False, scale=1.0), quest_scores(q, low, high, scale=1)
    (tensor([[7.]]), tensor([[5.]]))
    """
    shape = q.ndim == 2 and low.ndim == 3 and low.shape == high.shape
    fits = shape and q.shape[1] == low.shape[2] and q.shape[0] % low.shape[1] == 0
    require(fits, "q", "[H, D] for low and high [N, H_kv, D]", (q.shape, low.shape, high.shape))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[1] ** -0.5 if scale is None else scale
    halved = (q.to(wide) * (scale / 2)).reshape(low.shape[1], -1, q.shape[1])  # [H_kv, M, D]
    low, high = (x.to(wide).permute(1, 2, 0) for x in (low, high))  # [H_kv, D, N]
    width = high - low
    spread = (halved**2 @ width.square_()).sqrt_() if normalise else halved.abs() @ width
    return (halved @ (high + low) + spread).flatten(0, 1)
