"""Scorers as modules, and how a learned score gets a gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynchunk._checks import describe
from dynchunk.attention.layout import one_chunk_each, positions
from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import Hash, Learned, Rescored, Router, ScoreSpec, TokenClasses
from dynchunk.boundaries import BoundaryRule, FixedStride, HashScore, SimilarityScore
from dynchunk.chunks import Chunks

_LEAST_P = 1e-4


class Segmented(NamedTuple):
    """The chunks of a group of layers."""

    chunks: tuple[Chunks, ...]  #: of the policy's score, then of each view on another
    log_p: tuple[Tensor | None, ...]  #: [T] for each of them, the credit of its score
    ratio_loss: Tensor | None  #: of the routers among the scores


class TokenScore(nn.Module):
    """Scores that the token ids decide."""

    def __init__(self, spec: Hash | TokenClasses) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, tokens: Tensor, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return scores [T]."""
        if isinstance(self.spec, Hash):
            return HashScore(self.spec.n, self.spec.seed)(tokens, cu_seqlens)
        starts = torch.tensor(self.spec.starts, device=tokens.device, dtype=tokens.dtype)
        return torch.isin(tokens, starts).to(hidden.dtype)


class LearnedScore(nn.Module):
    """A linear function of a token's normalised hidden state and of those before it."""

    def __init__(self, reach: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(reach + 1, dim) * dim**-0.5)

    def forward(self, tokens: Tensor, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return scores [T]; hidden states before a sequence count as zero."""
        x = nn.functional.rms_norm(hidden, hidden.shape[-1:])
        offset = positions(cu_seqlens)
        # No matrix product: its bits depend on the number of rows, and equal tokens have to tie.
        terms = (x[:, None] * self.weight).sum(-1)
        score = terms[:, 0]
        for back in range(1, terms.shape[1]):
            before = terms[:, back].roll(back)
            score = score + before.where(offset >= back, 0)
        return score


class RouterScore(nn.Module):
    """H-Net's router on hidden states."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.similarity = SimilarityScore(dim)

    def forward(self, tokens: Tensor, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return scores [T]."""
        scores: Tensor = self.similarity(hidden, cu_seqlens)
        return scores


def build_scorer(spec: ScoreSpec, dim: int) -> nn.Module:
    """Return the module of a specification; it takes (tokens, hidden states, cu_seqlens).

    >>> build_scorer(Hash(2), dim=8)(torch.tensor([3, 4]), torch.zeros(2, 8), torch.tensor([0, 2]))
    tensor([0.0114, 0.1909])
    """
    if isinstance(spec, Learned):
        return LearnedScore(spec.reach, dim)
    return RouterScore(dim) if isinstance(spec, Router) else TokenScore(spec)


def score_specs(policy: Policy) -> tuple[ScoreSpec, ...]:
    """Return a policy's score, if it has one, then those of its views on another."""
    own = () if policy.score is None else (policy.score,)
    return own + tuple(view.score for view in policy.views if isinstance(view, Rescored))


def ratio_loss(p: Tensor, is_boundary: Tensor, ratio: float) -> Tensor:
    """H-Net's loss, least where boundaries make up 1 / ratio of the tokens (arXiv 2507.07955).

    With F the share of boundaries and G the mean of p: N / (N - 1) ((N - 1) F G + (1 - F)(1 - G)),
    N the ratio. Its gradient in G has the sign of F - 1 / N.

    >>> ratio_loss(torch.tensor([0.75, 0.25]), torch.tensor([True, False]), ratio=2)
    tensor(1.)
    """
    share, mean = is_boundary.to(p.dtype).mean(), p.mean()
    return ratio / (ratio - 1) * ((ratio - 1) * share * mean + (1 - share) * (1 - mean))


def reach(spec: ScoreSpec | None) -> int:
    """Return how many tokens before its own a score reads, of those that its input has read.

    >>> reach(Hash(3)), reach(TokenClasses((7,))), reach(Router())
    (2, 0, 1)
    """
    if isinstance(spec, Hash):
        return spec.n - 1
    return spec.reach if isinstance(spec, Learned) else int(isinstance(spec, Router))


def has_credit(spec: ScoreSpec | None) -> bool:
    """Return whether a score is added to the logits of the entries of its chunks."""
    return isinstance(spec, Learned | Router) and spec.credit == "log_p"


def log_p(spec: ScoreSpec | None, rule: BoundaryRule, scores: Tensor, cu: Tensor) -> Tensor | None:
    """Return the log probability that a chunk starts at each token, [T], or None for no credit.

    A router's score is that probability. Another learned score is read as the logit of being the
    maximum of the rule's radius, times, where there is a threshold, that of passing it.
    """
    if not isinstance(spec, Learned | Router) or spec.credit == "none":
        return None
    if isinstance(spec, Router):
        total = scores.clamp(min=_LEAST_P).log()
    else:
        total = scores - _logsumexp_around(scores, cu, rule.radius)
        if rule.threshold > -torch.inf:
            total = total + nn.functional.logsigmoid(scores - rule.threshold)
    total = total.where(positions(cu) > 0, 0)
    return total - total.detach() if spec.credit == "straight_through" else total


class Segmenter(nn.Module):
    """What cuts the sequences for a group of layers: the rule of a policy and its scorers.

    Parameters
    ----------
    policy : Policy
        Only its boundaries, score and views on another score matter.
    dim : int
        Size of the hidden states that learned scores read.

    Examples
    --------
    >>> from dynchunk.boundaries import BoundaryRule
    >>> policy = Policy(BoundaryRule(1, threshold=0.5), TokenClasses((7,)))
    >>> tokens = torch.tensor([3, 4, 7, 3, 7, 5])
    >>> Segmenter(policy, dim=8)(tokens, torch.zeros(6, 8), torch.tensor([0, 6])).chunks[0].starts
    tensor([0, 2, 4])
    """

    def __init__(self, policy: Policy, dim: int) -> None:
        super().__init__()
        self.rule, self.has_score = policy.boundaries, policy.score is not None
        self.specs = score_specs(policy)
        self.scorers = nn.ModuleList(build_scorer(spec, dim) for spec in self.specs)

    @property
    def reads_hidden(self) -> bool:
        """Whether a score reads hidden states; else the ids of the tokens are enough."""
        return any(isinstance(spec, Learned | Router) for spec in self.specs)

    def scores(self, tokens: Tensor, hidden: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
        """Return the scores [T] of packed sequences, for each of the policy's scorers."""
        return [scorer(tokens, hidden, cu_seqlens) for scorer in self.scorers]

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        cu_seqlens: Tensor,
        scores: Tensor | None = None,
        credit: Tensor | None = None,
    ) -> Segmented:
        """Cut packed sequences; ``scores`` and ``credit`` [T] are the caller's, for no score."""
        rule = self.rule
        if isinstance(rule, FixedStride):
            return Segmented((Chunks.fixed(rule.stride, cu_seqlens, rule.offset),), (None,), None)
        if rule is None:
            return Segmented((one_chunk_each(cu_seqlens),), (None,), None)
        found = self.scores(tokens, hidden, cu_seqlens)
        credits = [
            log_p(spec, rule, of_view, cu_seqlens)
            for spec, of_view in zip(self.specs, found, strict=True)
        ]
        chunks = [rule(of_view.detach(), cu_seqlens) for of_view in found]
        losses = [
            ratio_loss(of_view, cut.slots == 0, spec.ratio)
            for spec, of_view, cut in zip(self.specs, found, chunks, strict=True)
            if isinstance(spec, Router)
        ]
        if not self.has_score:
            chunks.insert(0, rule(given_scores(scores, tokens).detach(), cu_seqlens))
            credits.insert(0, credit)
        loss = torch.stack(losses).mean() if losses else None
        return Segmented(tuple(chunks), tuple(credits), loss)


def given_scores(scores: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the caller's scores [T], for a policy that has none of its own."""
    if scores is None or scores.shape != tokens.shape:
        expected = f"[{len(tokens)}], or chunks: the policy has no score of its own"
        raise ValueError(f"scores: expected scores {expected}, got {describe(scores)}")
    return scores


def _logsumexp_around(scores: Tensor, cu: Tensor, radius: int) -> Tensor:
    """Return logsumexp of the scores at most ``radius`` away in the same sequence, [T]."""
    sequence = torch.repeat_interleave(cu.diff())
    rows = []
    for step in range(-radius, radius + 1):
        same = sequence.roll(step) == sequence
        if step > 0:
            same[:step] = False
        elif step < 0:
            same[step:] = False
        rows.append(scores.roll(step).where(same, -torch.inf))
    return torch.stack(rows).logsumexp(0)
