"""Change of the model's own keys: training-free boundaries for an existing checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk._checks import require_int, require_vectors
from dynchunk.boundaries.scores.base import Score


class KeyChangeScore(Score):
    """One minus the cosine between a token's keys and the previous token's, mean over heads.

    Takes keys BEFORE the rotary embedding, [T, D] or [T, H, D]: after it, even equal keys differ.
    In [0, 2]; the first token of a sequence scores 1, as if its predecessor were unrelated.

    Parameters
    ----------
    input_receptive_field : int or None
        Tokens before t that a key at t has read: 0 for keys of a layer that sees token embeddings
        only, None (default) for deeper layers. ``receptive_field`` is one more, or None: then the
        guarantees of a rule hold for the scores given, not for the text.

    Examples
    --------
    >>> keys = torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0]])
    >>> KeyChangeScore()(keys)
    tensor([1., 0., 1.])
    """

    def __init__(self, input_receptive_field: int | None = None) -> None:
        self.receptive_field = one_more(input_receptive_field)

    def check(self, tokens: object) -> Tensor:
        """Return floating keys [T, D] or [T, H, D]."""
        return require_vectors("keys", tokens, ndims=(2, 3))

    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return scores [T] of the keys' dtype, float32 at least."""
        change = 1 - previous_cosine(tokens, tokens)
        change = change.mean(1) if change.ndim == 2 else change
        return torch.where(offsets > 0, change, 1.0)


def one_more(input_receptive_field: int | None) -> int | None:
    """Reach of a score that compares t with t - 1 on inputs of the given reach."""
    if input_receptive_field is None:
        return None
    return require_int("input_receptive_field", input_receptive_field, 0) + 1


def previous_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of x[t] and y[t - 1] over the last axis, in float32 at least; [0] wraps around."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.cosine_similarity(x.to(dtype), y.to(dtype).roll(1, 0), dim=-1)
