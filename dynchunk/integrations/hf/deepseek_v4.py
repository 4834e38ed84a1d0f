"""DeepSeek V4 of transformers with our attention: any batch, any boundaries, linear memory.

Each ``DeepseekV4Attention`` of a model becomes a :class:`ChunkedV4Attention`: the same object with
the same projections, norms and biases, so that adapters, quantised layers, optimisers and
checkpoints see no difference. What changes is what lies between the projections. The rest of the
model, its experts and hyper-connections, is transformers'. No mask of T x T is built.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from dynchunk._checks import describe, require
from dynchunk.attention import Policy
from dynchunk.attention.deepseek_v4 import V4Mixing
from dynchunk.attention.indexer import Choosing
from dynchunk.attention.specs import Hash, TokenClasses, TopK
from dynchunk.integrations.deepseek_v4 import policy_of
from dynchunk.integrations.hf import record
from dynchunk.integrations.hf.attention import NAME, Forward, required, without_gradient
from dynchunk.integrations.hf.ragged import Ragged
from dynchunk.integrations.hf.report import (
    LayerReport,
    Report,
    attention_modules,
    unwrapped_class_instance,
)
from dynchunk.integrations.hf.wrapping import Wrapping
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool


class ChunkedV4Attention(V4Mixing, theirs.DeepseekV4Attention):
    """A layer of a wrapped model: transformers' weights, our operations.

    Attributes
    ----------
    policy : Policy
    """

    @torch.compiler.disable  # what the host counts differs from step to step
    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        dynchunk: Forward | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Mix hidden states [B, T, dim]; positions and masks are in ``dynchunk``."""
        forward = required(dynchunk)
        dropout = self.attention_dropout if self.training else 0
        require(dropout == 0, "attention_dropout", "0 (set it in the model's config)", dropout)
        x = forward.ragged.pack(hidden_states)
        if forward.cache is None:
            layout = forward.layout(self.policy, x.device)
            return forward.ragged.unpack(self.mix(x, layout, forward.impl).out), None
        out = self.stream(x, forward.cache.layer(self.layer_idx), forward.impl)
        return forward.ragged.unpack(without_gradient(out, x)), None

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries' low-rank form, which the indexer reads, and the queries."""
        low_rank = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(low_rank).reshape(len(x), self.num_heads, self.head_dim)
        return low_rank, self.q_b_norm(q)

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys, which are the values, [T, 1, head_dim] before RoPE."""
        kv: Tensor = self.kv_norm(self.kv_proj(x))[:, None]
        return kv

    def entries(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        """Return the entries [N, 1, head_dim] before RoPE, of spans of the hidden states."""
        return _pool(self.compressor, x, views)

    def chooser(self) -> Choosing | None:
        """Return the indexer, if there is one."""
        if not isinstance(self.policy.selection, TopK) or self.policy.boundaries is None:
            return None
        compressor: Any = self.compressor
        return _Indexer(compressor.indexer, self.policy, self.head_dim)

    def sinks_of_heads(self) -> Tensor | None:
        """Return the sinks [heads]."""
        sinks: Tensor = self.sinks
        return sinks

    def output(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [S, heads, head_dim] to [S, dim]."""
        if len(out) == 0:  # transformers' projection cannot tell the shape of nothing
            return out.new_zeros(0, self.config.hidden_size)
        grouped = out.reshape(len(out), self.config.o_groups, -1)
        mixed: Tensor = self.o_b_proj(self.o_a_proj(grouped).flatten(1))
        return mixed


class _Indexer(Choosing):
    """A ``DeepseekV4Indexer``; a choice passes no gradient, so there is none."""

    def __init__(self, indexer: Any, policy: Policy, head_dim: int) -> None:
        assert isinstance(policy.selection, TopK)
        self.theirs, self.topk = indexer, policy.selection
        rope = policy.rope
        self.rope = None if rope is None else rope.for_index(head_dim, self.topk.dim)

    @torch.no_grad()
    def project(self, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        return self.theirs.q_b_proj(query), self.theirs.scorer.weights_proj(x)

    @torch.no_grad()
    def pool(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        return _pool(self.theirs, x, views)


def _pool(compressor: Any, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
    """Pool hidden states with the weights of a compressor or an indexer of transformers."""
    values, gate = compressor.kv_proj(x), compressor.gate_proj(x)
    norm = compressor.kv_norm
    weights = {"slot_bias": compressor.position_bias, "norm": norm.weight}
    return [
        pool(values, spans, gate=gate, eps=norm.variance_epsilon, **weights)[:, None]
        for spans in views
    ]


def v4_policies(config: Any) -> dict[str, Policy]:
    """Return the policy of each type of layer in a ``DeepseekV4Config``: the model's own strides.

    Replace the boundaries of some to let windows follow the text; what else a policy says is fixed
    by the model's weights, but for the raw window.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from transformers import DeepseekV4Config
    >>> from dynchunk import BoundaryRule
    >>> from dynchunk.attention import Hash
    >>> policies = v4_policies(DeepseekV4Config(num_hidden_layers=4))
    >>> csa = "compressed_sparse_attention"
    >>> rule = BoundaryRule(1, max_length=16)
    >>> policies[csa] = replace(policies[csa], boundaries=rule, score=Hash(3))
    """
    return {kind: policy_of(config, i) for i, kind in reversed([*enumerate(config.layer_types)])}


def supported(model: Any, layers: Collection[int] | None = None) -> Report:
    """Say what wrapping a DeepSeek V4 would do: all layers are wrapped, of all types."""
    inner = unwrapped_class_instance(model)
    decoder = inner.get_decoder()
    config, names, problems = decoder.config, attention_modules(decoder), []
    if config._attn_implementation == NAME:
        problems.append("it is wrapped already: dynchunk.unwrap(model) first")
    if layers is not None:
        problems.append("layers: all layers of a DeepSeek V4 are wrapped, or none; leave it out")
    found = tuple(
        LayerReport(i, names[i], kind, True, "") for i, kind in enumerate(config.layer_types)
    )
    return Report(type(inner).__name__, config.model_type, found, tuple(problems))


def attach(
    model: Any,
    policy: Mapping[str, Policy] | Sequence[Policy | None] | None,
    *,
    layers: Collection[int] | None = None,
    **options: Any,
) -> Wrapping:
    """Wrap a DeepSeek V4; see :func:`dynchunk.wrap`.

    Parameters
    ----------
    model : DeepseekV4ForCausalLM or DeepseekV4Model
        Or one of PEFT around it.
    policy : mapping from type of layer to Policy, or a sequence of them, one per layer
        As :func:`v4_policies` returns, with other boundaries. Types that are left out, and None,
        keep the model's own strides.
    layers : None
    **options
        Of :class:`~dynchunk.integrations.hf.wrapping.Wrapping`.
    """
    report = supported(model, layers)
    if report.problems:
        raise ValueError("model: it cannot be wrapped: " + "; ".join(report.problems))
    config = unwrapped_class_instance(model).get_decoder().config
    if policy is None and (recorded := config.__dict__.get(record.KEY)) is not None:
        policy = record.read(recorded)
    wrapping = V4Wrapping(model, report, _policies(config, policy), **options)
    wrapping.attach()
    return wrapping


class V4Wrapping(Wrapping):
    """What was done to a DeepSeek V4."""

    def install(self) -> None:
        """Change the decoder, its layers, and what ``generate`` takes it for."""
        super().install()
        self.inner._is_stateful = False  # its caches can go back
        for layer, policy in zip(self.decoder.layers, self.policies, strict=True):
            layer.self_attn.__class__, layer.self_attn.policy = ChunkedV4Attention, policy

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for layer in self.decoder.layers:
            layer.self_attn.__class__ = theirs.DeepseekV4Attention
            del layer.self_attn.policy
        del self.inner._is_stateful
        super().remove()

    def check(self, ragged: Ragged, position_ids: Tensor | None) -> None:
        """Refuse positions that are not those of the sequences: what RoPE sees is counted."""
        if position_ids is None:
            return
        at = ragged.pack(position_ids.expand(ragged.real.shape)).cpu()
        is_first = torch.zeros(len(at) + 1, dtype=torch.bool)
        is_first[ragged.cu_seqlens[:-1]] = True
        follows = (at.diff() == 1) | is_first[1:-1]
        require(
            bool(follows.all()),
            "position_ids",
            "positions that go up by one (documents packed into a row need no attention_mask)",
            position_ids,
        )


def _policies(
    config: Any, given: Mapping[str, Policy] | Sequence[Policy | None] | None
) -> list[Policy]:
    """Return the policy of each layer; equal ones are one object."""
    own, kinds = v4_policies(config), config.layer_types
    expected = "a policy for each type of layer, such as v4_policies(model.config) returns"
    if isinstance(given, Mapping):
        for kind in given:
            require(kind in own, "policy", f"types of layers of the model, {sorted(own)}", kind)
        given = [given.get(kind) for kind in kinds]
    elif given is None:
        given = [None] * len(kinds)
    elif isinstance(given, Policy) or not isinstance(given, Sequence):
        raise TypeError(f"policy: expected {expected}, got {describe(given)}")
    require(len(given) == len(kinds), "policy", f"one for each of {len(kinds)} layers", given)
    distinct: dict[Policy, Policy] = {}
    found = [own[kind] if one is None else one for kind, one in zip(kinds, given, strict=True)]
    for kind, one in zip(kinds, found, strict=True):
        _require_fits(f"policy[{kind!r}]", one, own[kind])
    return [distinct.setdefault(one, one) for one in found]


#: What the weights of a model leave open.
_FREE = ("boundaries", "score", "window", "cover", "allow_unseen")


def _require_fits(name: str, policy: object, own: Policy) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"{name}: expected a dynchunk.attention.Policy, got {describe(policy)}")
    same = (policy.boundaries is None) == (own.boundaries is None)
    changed = replace(own, **{field: getattr(policy, field) for field in _FREE}) if same else own
    require(changed == policy, name, f"the model's own but for {', '.join(_FREE)}", policy)
    by_ids = policy.score is None or isinstance(policy.score, Hash | TokenClasses)
    require(by_ids, f"{name}: score", "Hash or TokenClasses", policy.score)
