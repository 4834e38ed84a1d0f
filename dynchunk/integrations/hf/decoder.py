"""Decoder-only models that take attention from transformers: policies into each of their layers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynchunk._checks import describe, require
from dynchunk.attention.policy import Policy, full
from dynchunk.attention.scoring import score_specs
from dynchunk.attention.specs import Learned, MeanPool, Router
from dynchunk.cache.layer import require_weightless
from dynchunk.integrations.hf import record
from dynchunk.integrations.hf.report import Report, supported, unwrapped_class_instance
from dynchunk.integrations.hf.wrapping import Wrapping

__all__ = ["attach", "supported"]

POOLING_COSTS = (
    "mean-pooled entries lose most of what a far context is worth to a model that was not trained "
    "with them: on SmolLM2-135M, at 4 tokens an entry, the loss rises by .34 to .46 nats where "
    "keeping the same number of raw tokens costs .07 to .11. Keep or select chunks instead, or "
    "fine-tune (trainable=True)"
)


def attach(
    model: Any,
    policy: Policy | Sequence[Policy | None] | None,
    *,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> Wrapping:
    """Wrap a decoder-only model that takes attention from transformers; see :func:`dynchunk.wrap`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    policy, layers
        As in :func:`dynchunk.wrap`.
    **options
        Of :class:`Wrapping`.
    """
    chosen = layers
    if policy is not None and not isinstance(policy, Policy):
        chosen = [i for i, one in enumerate(policy) if one is not None]
        require(layers is None, "layers", "None with a policy for each layer", layers)
    config = getattr(unwrapped_class_instance(model), "config", None)
    recorded = (
        None if config is None else config.get_text_config(decoder=True).__dict__.get(record.KEY)
    )
    if policy is None and recorded is not None:
        policy = record.read(recorded)
        options = options | {"trainable": options.get("trainable") or recorded["trainable"]}
        chosen = [i for i, one in enumerate(policy) if one is not None]
    report = supported(model, chosen)
    if report.problems:
        raise ValueError("model: it cannot be wrapped: " + "; ".join(report.problems))
    wrapping = Wrapping(model, report, _policies(policy, report), **options)
    _check_policies(wrapping)
    wrapping.attach()
    return wrapping


def _policies(
    policy: Policy | Sequence[Policy | None] | None, report: Report
) -> list[Policy | None]:
    """Return what each layer follows; equal policies are one object."""
    n = len(report.layers)
    given = [policy or full()] * n if policy is None or isinstance(policy, Policy) else list(policy)
    require(len(given) == n, "policy", f"one for each of {n} layers", policy)
    distinct: dict[Policy, Policy] = {}
    policies: list[Policy | None] = []
    for layer, one in zip(report.layers, given, strict=True):
        if one is None or not layer.wrapped:
            policies.append(None)
            continue
        if not isinstance(one, Policy):
            raise TypeError(f"policy: expected a dynchunk.attention.Policy, got {describe(one)}")
        # Positions are in the keys already, and a model has its own sinks.
        one = replace(one, rope=None, sink=False)
        policies.append(distinct.setdefault(one, one))
    return policies


def _check_policies(wrapping: Wrapping) -> None:
    config = wrapping.decoder.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    own = list(dict.fromkeys(policy for policy in wrapping.policies if policy is not None))
    for policy in own:
        require_weightless(policy)
        learned = any(isinstance(spec, Learned | Router) for spec in score_specs(policy))
        expected = "one without weights, or trainable=True"
        require(not learned or wrapping.trainable, "policy: score", expected, policy.score)
        views = len(policy.views)
        expected = f"a number that divides the model's {kv_heads} KV heads"
        require(kv_heads % views == 0, "policy: views", expected, views)
    means = [p for p in own if p.boundaries is not None and isinstance(p.reduction, MeanPool)]
    if means and not wrapping.trainable:
        warnings.warn(f"dynchunk.wrap: {POOLING_COSTS}", UserWarning, stacklevel=4)
    if not wrapping.report.tested:
        warnings.warn(
            f"dynchunk.wrap: no model of type {wrapping.report.model_type!r} is among the tests; "
            "compare its logits without a policy (dynchunk.wrap(model)) with the unwrapped ones",
            UserWarning,
            stacklevel=4,
        )
