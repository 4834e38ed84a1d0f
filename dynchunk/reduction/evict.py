"""Keep or evict whole chunks by the attention that the last queries paid to them.

The score of a token is the attention that it got from an observation window, the last queries (Li
et al., arXiv 2404.14469, SnapKV, section 3); that of a chunk is the sum over its tokens (Liu et
al., arXiv 2502.00299, ChunkKV, section 3), per token if chunks differ in length: a budget counts
tokens, and what is worth most for what it costs is kept first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops.budget import best_within


def observed_attention(
    q: Tensor, k: Tensor, *, sink: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return the attention that each key of one KV head gets, summed over queries and heads.

    Parameters
    ----------
    q : floating tensor [Q, M, D]
        The last Q queries of a sequence, of the M query heads that share the KV head.
    k : floating tensor [N, D]
        Keys in order, the last Q of them at the queries' own tokens: those after a query's own are
        not read.
    sink : floating tensor [M], optional
        A logit without a value.
    scale : float, optional
        Default: D^-1/2.

    Returns
    -------
    tensor [N], float32 at least

    Examples
    --------
    >>> observed_attention(torch.zeros(2, 1, 4), torch.zeros(3, 4))
    tensor([0.8333, 0.8333, 0.3333])
    """
    fits = q.ndim == 3 and k.ndim == 2 and q.shape[2] == k.shape[1] and len(q) <= len(k)
    require(fits, "q", "[Q, M, D] for k [N, D], Q <= N", (q.shape, k.shape))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[2] ** -0.5 if scale is None else scale
    logits = (q.to(wide) * scale) @ k.to(wide).T  # [Q, M, N]
    last = torch.arange(len(k) - len(q), len(k), device=k.device)
    later = torch.arange(len(k), device=k.device) > last[:, None]
    logits = logits.masked_fill(later[:, None], -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink.to(wide)[:, None])
    return (logits - total).exp().sum((0, 1))


def chunks_to_keep(
    attention: Tensor,
    lengths: Tensor,
    budget: int,
    *,
    protected: Tensor,
    per_token: bool = True,
) -> Tensor:
    """Choose the chunks that stay, whole.

    Parameters
    ----------
    attention : floating tensor [T]
        Of the chunks' tokens, chunk after chunk: what :func:`observed_attention` returned.
    lengths : int64 tensor [N]
        Tokens in each chunk, >= 1; T in all.
    budget : int
        Tokens that may stay in all. Equal scores: the earlier chunk stays.
    protected : bool tensor [N]
        Chunks that stay whatever the budget is, and use it up first.
    per_token : bool
        Divide a chunk's summed attention by its tokens.

    Returns
    -------
    bool tensor [N]

    Examples
    --------
    >>> attention = torch.tensor([0.1, 0.1, 0.5, 0.2, 0.2, 0.1])
    >>> lengths, none = torch.tensor([2, 1, 3]), torch.zeros(3, dtype=torch.bool)
    >>> chunks_to_keep(attention, lengths, 4, protected=none)
    tensor([False,  True,  True])
    """
    scores = torch.segment_reduce(attention, "sum", lengths=lengths)
    scores = (scores / lengths if per_token else scores).masked_fill(protected, torch.inf)
    order, total = best_within(scores, lengths, budget)
    keep = torch.zeros_like(protected)
    keep[order] = total <= budget
    return keep | protected
