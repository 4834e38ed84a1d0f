"""H-Net's router: a learned score that is high where neighbouring hidden states differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynchunk._checks import require, require_int, require_vectors
from dynchunk.boundaries.scores.base import Score
from dynchunk.boundaries.scores.keys import one_more, previous_cosine
from dynchunk.chunks import SequenceOffsets


class SimilarityScore(nn.Module, Score):
    """p_t = (1 - cos(W_q x_t, W_k x_{t-1})) / 2, in [0, 1]; the first token scores 1.

    The router of H-Net (Hwang, Wang and Gu, arXiv 2507.07955, section 2.2.1), which starts a chunk
    where p_t >= 0.5: ``BoundaryRule(radius=0, threshold=0.5)``. Both maps start as the identity.
    Scores are differentiable in the weights and the input.

    Parameters
    ----------
    dim : int >= 1
        Size of the hidden states [T, dim].
    input_receptive_field : int or None
        Tokens before t that a hidden state at t has read: 0 for embeddings, None (default) for
        hidden states of attention or state-space layers. ``receptive_field`` is one more, or None.

    Examples
    --------
    >>> score = SimilarityScore(2, input_receptive_field=0)
    >>> score(torch.tensor([[1.0, 0], [1.0, 0], [-1.0, 0]])).tolist(), score.receptive_field
    ([1.0, 0.0, 1.0], 1)
    """

    def __init__(self, dim: int, input_receptive_field: int | None = None) -> None:
        super().__init__()
        self.dim = require_int("dim", dim, 1)
        self.receptive_field = one_more(input_receptive_field)
        self.W_q = nn.Linear(dim, dim, bias=False)
        self.W_k = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.W_q.weight)
        nn.init.eye_(self.W_k.weight)

    def check(self, tokens: object) -> Tensor:
        """Return floating hidden states [T, dim]."""
        hidden = require_vectors("hidden states", tokens)
        require(hidden.shape[1] == self.dim, "hidden states", f"shape [T, {self.dim}]", hidden)
        return hidden

    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return scores [T]."""
        p = (1 - previous_cosine(self.W_q(tokens), self.W_k(tokens))) / 2
        return torch.where(offsets > 0, p.clamp(0, 1), 1.0)

    def forward(self, tokens: Tensor, cu_seqlens: SequenceOffsets | None = None) -> Tensor:
        """Score packed sequences, as every :class:`Score` does when called."""
        return Score.__call__(self, tokens, cu_seqlens)
