"""Scores of token ids, for policies that have none of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynchunk.boundaries.scores.base import Score


def given_scores(
    score: Score | None,
    tokens: Tensor,
    cu_seqlens: Tensor,
    past: Sequence[NDArray[np.int64]] | None = None,
) -> Tensor:
    """Score new tokens, each with those before it that the score reads.

    Parameters
    ----------
    score : Score
    tokens : integer tensor [S]
        New ones, packed.
    cu_seqlens : int64 tensor [B+1]
    past : B arrays of token ids, optional
        What came before.

    Returns
    -------
    floating tensor [S]

    Examples
    --------
    >>> from dynchunk.boundaries import HashScore
    >>> tokens, whole = torch.tensor([3, 4, 5]), torch.tensor([0, 3])
    >>> new = given_scores(HashScore(2), tokens[2:], torch.tensor([0, 1]), [np.array([3, 4])])
    >>> new == given_scores(HashScore(2), tokens, whole)[2:]
    tensor([True])
    """
    if score is None:
        raise ValueError(
            "score: the policy has boundaries and no score; pass wrap(..., score=...), such as "
            "DelimiterScore.from_tokenizer(tokenizer)"
        )
    reach = score.receptive_field
    if reach is None:
        raise ValueError("score: expected a bounded receptive field, got None")
    new = np.split(tokens.detach().cpu().numpy(), cu_seqlens.numpy()[1:-1])
    before = [row[max(0, len(row) - reach) :] for row in past or [row[:0] for row in new]]
    together = [np.concatenate(pair) for pair in zip(before, new, strict=True)]
    ends = np.cumsum([len(row) for row in together])
    found = score(
        torch.from_numpy(np.concatenate(together)), torch.from_numpy(np.append([0], ends))
    )
    wanted = [np.arange(end - len(row), end) for end, row in zip(ends, new, strict=True)]
    return found[torch.from_numpy(np.concatenate(wanted))].to(tokens.device)
