"""Which chunks fit into a budget of tokens, best first."""

from __future__ import annotations

from torch import Tensor


def best_within(scores: Tensor, lengths: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Order chunks by score, and count how many of the first ones fit into a budget.

    Chunks are taken whole, and none after the first that does not fit. Equal scores: the lower
    index first.

    Parameters
    ----------
    scores : floating tensor [..., N]
    lengths : integer tensor [N]
        Tokens that each chunk costs, >= 0.
    budget : int

    Returns
    -------
    order : int64 tensor [..., N]
    total : int64 tensor [..., N]
        Tokens of the chunks up to each in that order. As many are within the budget as are <= it.

    Examples
    --------
    >>> import torch
    >>> best_within(torch.tensor([0.5, 2.0, 2.0]), torch.tensor([1, 2, 3]), 4)
    (tensor([1, 2, 0]), tensor([2, 5, 6]))
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order, lengths[order].cumsum(-1)
