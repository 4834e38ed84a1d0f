"""A recall model: a chunked transformer that is trained on, and asked, only what counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynchunk.attention import ChunkedTransformer, Output
from dynchunk.chunks import Chunks
from dynchunk.lab.policies import bigram_surprisal
from dynchunk.lab.task import RecallBatch, make_generator
from dynchunk.lab.variants import Variant


class Losses(NamedTuple):
    """What a batch says of a model."""

    total: Tensor
    recall: Tensor  #: mean cross-entropy of the answers
    accuracy: Tensor


class LabModel(nn.Module):
    """The model of a variant.

    Parameters
    ----------
    variant : Variant
    seed : int
        Of the initial weights.

    Examples
    --------
    >>> from dynchunk.lab import make_variant
    >>> model = LabModel(make_variant("fixed"))
    >>> batch = model.variant.task.draw(2, seed=0)
    >>> model.answer(batch.tokens, batch.asked_at).shape
    torch.Size([2, 16])
    """

    def __init__(self, variant: Variant, seed: int = 0) -> None:
        super().__init__()
        self.variant = variant
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = ChunkedTransformer(variant.config)

    def losses(self, batch: RecallBatch, *, seed: int = 0, step: int = 0) -> Losses:
        """Return the losses of a batch; seed and step draw a random grid's offset."""
        given = None
        if self.variant.random_offset:
            given = self._random_grids(batch.tokens, seed, step)
        logits, output = self._logits(batch.tokens, batch.asked_at, given)
        answers = batch.answers.flatten()
        recall = nn.functional.cross_entropy(logits, answers)
        total = recall
        if output.ratio_loss is not None:
            total = total + self.variant.ratio_weight * output.ratio_loss
        return Losses(total, recall, (logits.argmax(-1) == answers).float().mean())

    def answer(self, tokens: Tensor, asked_at: Tensor) -> Tensor:
        """Return the likeliest next tokens [B, Q] after ``asked_at`` [B, Q] of tokens [B, T]."""
        logits, _ = self._logits(tokens, asked_at)
        return logits.argmax(-1).reshape(asked_at.shape)

    def chunks(self, tokens: Tensor) -> Sequence[Sequence[Chunks]]:
        """Return the views of each layer of tokens [B, T], packed; none without chunks."""
        if self.variant.config.policy(0).boundaries is None:
            return ()
        return self._run(tokens).views

    def _logits(
        self, tokens: Tensor, asked_at: Tensor, given: list[Chunks] | None = None
    ) -> tuple[Tensor, Output]:
        """Return logits [B Q, vocab] after ``asked_at``, and all that the model returns."""
        rows, length = tokens.shape
        last = length - int(asked_at.min())
        output = self._run(tokens, given, last)
        at = asked_at - (length - last) + last * torch.arange(rows)[:, None]
        return output.logits[at.flatten()], output

    def _run(self, tokens: Tensor, given: list[Chunks] | None = None, last: int = 1) -> Output:
        # Scattering the logits of all tokens into a batch would cost a fifth of a training step.
        cu_seqlens = tokens.shape[1] * torch.arange(len(tokens) + 1)
        scores = None
        if self.variant.surprisal:
            scores = bigram_surprisal(self.variant.task)(tokens.flatten(), cu_seqlens)
        output: Output = self.net(
            tokens.flatten(),
            cu_seqlens,
            layer_chunks=given,
            scores=scores,
            last=last,
            impl="batched",
        )
        return output

    def _random_grids(self, tokens: Tensor, seed: int, step: int) -> list[Chunks]:
        stride = self.variant.phases
        generator = make_generator(seed, step, stride)
        offset = int(torch.randint(stride, (), generator=generator))
        cu_seqlens = tokens.shape[1] * torch.arange(len(tokens) + 1)
        return [Chunks.fixed(stride, cu_seqlens, offset)] * self.variant.config.layers
