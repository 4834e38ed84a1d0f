"""The policies of the controlled study, by name."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from dynchunk._checks import require, require_choice
from dynchunk.attention import (
    AsScored,
    GatedPool,
    Hash,
    Learned,
    MeanPool,
    Midpoints,
    Policy,
    Rescored,
    Rope,
    Router,
    Shifted,
    TokenClasses,
)
from dynchunk.attention.specs import ScoreSpec, View
from dynchunk.boundaries import (
    BoundaryRule,
    FixedStride,
    HashScore,
    Score,
    SurprisalScore,
    calibrate,
)
from dynchunk.lab.task import RecallTask

WINDOW = 12
GRIDS = ("fixed", "mean", "no-slot-bias", "no-rope", "random-offset", "staggered-layers")
CONTENTS = ("class", "surprisal", "hash", "router", "learned")
POLICIES = ("full", *GRIDS, *CONTENTS)
VIEWS = ("one", "second", "moved", "midpoints")

_ROPE = Rope(fraction=0.5)
_SAMPLE = 96  # sequences on which a threshold is calibrated
_SEED = 2_000_000_011  # apart from all seeds of training and evaluation
_CORPUS = 32_000  # sequences whose bigrams are counted


def base_policy(
    name: str, stride: int, max_length: int | None, task: RecallTask, ratio: float | None = None
) -> Policy:
    """Return the policy of that name with one view; see :func:`~dynchunk.lab.make_variant`.

    Examples
    --------
    >>> base_policy("fixed", 8, None, RecallTask()).boundaries
    FixedStride(stride=8, offset=0)
    """
    require_choice("policy", name, POLICIES)
    if name == "full":
        return Policy(window=None, rope=_ROPE)
    if name in CONTENTS:
        require(stride >= 2, "stride", "a ratio of at least 2 for content boundaries", stride)
        rule, score = _content(name, stride, max_length, task, ratio or stride)
        return Policy(rule, score, window=max(WINDOW, rule.min_window), rope=_ROPE)
    policy = Policy(FixedStride(stride), window=max(WINDOW, stride), rope=_ROPE)
    if name == "mean":
        reduction = MeanPool(own=True, norm=True, log_length=False)
        return replace(policy, reduction=reduction)
    if name == "no-slot-bias":
        return replace(policy, reduction=GatedPool(slot_bias=False))
    return replace(policy, rope=None) if name == "no-rope" else policy


def second_view(name: str, policy: Policy, stride: int) -> tuple[View, ...]:
    """Return the views of a policy of one or two.

    Examples
    --------
    >>> second_view("moved", base_policy("fixed", 6, None, RecallTask()), 6)
    (AsScored(), Shifted(k=3))
    """
    require_choice("view", name, VIEWS)
    if name == "one":
        return (AsScored(),)
    require(policy.boundaries is not None, "view", "'one' without chunks", name)
    if name == "moved":
        return AsScored(), Shifted(stride // 2)
    is_content = isinstance(policy.boundaries, BoundaryRule)
    require(is_content, "view", "'one' or 'moved' on a grid", name)
    if name == "midpoints":
        return AsScored(), Midpoints()
    score = policy.score
    if score is None or isinstance(score, TokenClasses):
        raise ValueError(f"view: expected another one for these boundaries, got {name!r}")
    return AsScored(), Rescored(replace(score, seed=1) if isinstance(score, Hash) else score)


def bigram_surprisal(task: RecallTask) -> SurprisalScore:
    """Return the surprisal under the bigrams of the task's own text: nothing is told.

    A key is hard to guess after filler, and after a value; a value after its key less so.
    """
    return _fit(replace(task, gap=WINDOW))  # one model, whatever the gap of a variant


@lru_cache(maxsize=4)
def _fit(task: RecallTask) -> SurprisalScore:
    tokens = task.draw(_CORPUS, seed=_SEED, prefix=0).tokens
    cu_seqlens = tokens.shape[1] * torch.arange(len(tokens) + 1)
    return SurprisalScore.fit(tokens.flatten(), 2, task.vocabulary, cu_seqlens)


def _content(
    name: str, stride: int, max_length: int | None, task: RecallTask, ratio: float
) -> tuple[BoundaryRule, ScoreSpec | None]:
    if name in ("class", "router"):
        rule = BoundaryRule(0, threshold=0.5, max_length=max_length or 3 * stride)
        expected = f"less than max_length = {rule.max_length}"
        require(stride < rule.max_length, "stride", expected, stride)
        return rule, TokenClasses(task.starts) if name == "class" else Router(float(stride))
    if name == "surprisal":
        rule = BoundaryRule(1, max_length=max_length or 3 * stride)
        return _calibrated(rule, bigram_surprisal(task), ratio, task), None
    # Local maxima of radius w are some 2w + 1 tokens apart; cuts at 1.5 times the ratio make up
    # for it.
    rule = BoundaryRule(stride // 2, max_length=max_length or stride + stride // 2)
    if name == "learned":
        expected = f"less than max_length = {rule.max_length}"
        require(stride < rule.max_length, "stride", expected, stride)
        return rule, Learned()
    return _calibrated(rule, HashScore(2), ratio, task), Hash(2)


def _calibrated(rule: BoundaryRule, score: Score, ratio: float, task: RecallTask) -> BoundaryRule:
    """Reach a ratio on contexts: it is their entries that queries read."""
    tokens = task.draw(_SAMPLE, seed=_SEED + 1, prefix=0).tokens[:, : task.context]
    cu_seqlens = task.context * torch.arange(_SAMPLE + 1)
    scores = score(tokens.flatten(), cu_seqlens)
    return calibrate(rule, scores, ratio, cu_seqlens, tolerance=0.05)
