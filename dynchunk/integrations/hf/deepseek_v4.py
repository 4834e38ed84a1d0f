"""DeepSeek V4 of transformers with our attention: any batch, any boundaries, linear memory.

Each ``DeepseekV4Attention`` of a model becomes a :class:`ChunkedV4Attention`: the same object with
the same projections, norms and biases, so that adapters, quantised layers, optimisers and
checkpoints see no difference. What changes is what lies between the projections. The rest of the
model, its experts and hyper-connections, is transformers'.

Each forward of the model starts a :class:`V4Step`, which packs the batch and cuts it into chunks
once for all layers of one kind. It travels to the layers in place of the mask of [T, T], which is
never built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from dynchunk._checks import describe, require
from dynchunk.attention import Layout, Policy
from dynchunk.attention.deepseek_v4 import V4Mixing
from dynchunk.attention.indexer import Choosing
from dynchunk.attention.scoring import Segmenter
from dynchunk.attention.specs import Hash, TokenClasses, TopK
from dynchunk.boundaries import BoundaryRule
from dynchunk.boundaries.scores.base import Score
from dynchunk.cache.cache import ROLLBACK
from dynchunk.chunks import Chunks
from dynchunk.integrations.deepseek_v4 import policy_of
from dynchunk.integrations.hf.cache import ChunkedCache
from dynchunk.integrations.hf.ragged import Ragged
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool


@dataclass(frozen=True, eq=False)
class V4Step:
    """What the layers share in one forward of the model."""

    ragged: Ragged
    cache: ChunkedCache | None
    layouts: Mapping[Policy, Layout]  #: where there is no cache


class ChunkedV4Attention(V4Mixing, theirs.DeepseekV4Attention):  # type: ignore[misc]
    """A layer of a wrapped model: transformers' weights, our operations.

    Attributes
    ----------
    policy : Policy
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        position_ids: Tensor | None = None,
        attention_mask: V4Step | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Mix hidden states [B, T, dim]; the step comes where transformers has the mask."""
        step = attention_mask
        if not isinstance(step, V4Step):
            raise TypeError(
                "attention: a wrapped layer works in a forward of the whole model only; call the "
                f"model, or dynchunk.unwrap it first (attention_mask is {describe(step)})"
            )
        x = step.ragged.pack(hidden_states)
        if step.cache is None:
            out = self.mix(x, step.layouts[self.policy]).out
        else:
            out = self.stream(x, step.cache.layer(self.layer_idx))
            if hidden_states.requires_grad and torch.is_grad_enabled():
                out = _WithoutGradient.apply(out, x)  # type: ignore[no-untyped-call]
        return step.ragged.unpack(out), None

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
        return _Indexer(self.compressor.indexer, self.policy, self.head_dim)

    def sinks_of_heads(self) -> Tensor | None:
        """Return the sinks [heads]."""
        sinks: Tensor = self.sinks
        return sinks

    def output(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [S, heads, head_dim] to [S, dim]."""
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


class _WithoutGradient(torch.autograd.Function):
    """Marks what was computed with a cache: a backward through it is refused, not wrong."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        raise RuntimeError(
            "cache: there is no gradient through a cache; call the model with use_cache=False"
        )


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


def checked_policies(config: Any, given: Mapping[str, Policy] | None) -> dict[str, Policy]:
    """Return the policy of each type of layer, those given in place of the model's own."""
    own = v4_policies(config)
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            "policy: expected a policy for each type of layer, such as "
            f"v4_policies(model.config) changed; got {describe(given)}"
        )
    for kind, policy in (given or {}).items():
        require(kind in own, "policy", f"layer types of the model, {sorted(own)}", kind)
        require(isinstance(policy, Policy), f"policy[{kind!r}]", "a Policy", policy)
        free = {name: getattr(policy, name) for name in _FREE}
        if policy.boundaries is None:
            free.pop("boundaries")
        expected = "the model's own but for " + ", ".join(_FREE)
        require(replace(own[kind], **free) == policy, f"policy[{kind!r}]", expected, policy)
        is_learned = policy.score is not None and not isinstance(policy.score, Hash | TokenClasses)
        require(not is_learned, f"policy[{kind!r}]: score", "Hash or TokenClasses", policy.score)
        own[kind] = policy
    return own


#: What of a policy the weights of a model leave open.
_FREE = ("boundaries", "score", "window", "cover", "allow_unseen")


@dataclass(frozen=True, eq=False)
class V4Settings:
    """What a wrapped model does in a forward; its decoder has it as ``_dynchunk``."""

    policies: tuple[Policy, ...]  #: of each layer
    score: Score | None
    rollback: int | None

    def new_cache(self) -> ChunkedCache:
        """Return an empty cache."""
        return ChunkedCache(self.policies, score=self.score, rollback=self.rollback)

    def step(self, ragged: Ragged, tokens: Tensor | None, cache: ChunkedCache | None) -> V4Step:
        """Cut the new tokens [B, T] of a batch into chunks, once for all layers."""
        packed = None if tokens is None else ragged.pack(tokens)
        if cache is not None:
            cache.begin(ragged, packed)
            return V4Step(ragged, cache, {})
        cu = ragged.cu_seqlens if tokens is None else ragged.cu_seqlens.to(tokens.device)
        chunks = {(p.boundaries, p.score): self._cut(p, packed, cu) for p in set(self.policies)}
        layouts = {p: Layout.of(p, chunks[p.boundaries, p.score]) for p in set(self.policies)}
        return V4Step(ragged, None, layouts)

    def _cut(self, policy: Policy, tokens: Tensor | None, cu_seqlens: Tensor) -> Chunks:
        size, scores = int(cu_seqlens[-1]), None
        if isinstance(policy.boundaries, BoundaryRule):
            if tokens is None:
                raise ValueError(
                    "inputs_embeds: the policy's boundaries follow the ids of the tokens; pass "
                    "input_ids, or a policy of fixed strides"
                )
            scores = None if self.score is None else self.score(tokens, cu_seqlens)
        ids = cu_seqlens.new_zeros(size) if tokens is None else tokens
        segmenter, hidden = Segmenter(policy, 1), torch.zeros(size, 0, device=cu_seqlens.device)
        return segmenter(ids, hidden, cu_seqlens, scores).chunks[0]


def wrap_deepseek_v4(
    model: Any,
    policy: Mapping[str, Policy] | None = None,
    *,
    score: Score | None = None,
    rollback: int | None = ROLLBACK,
) -> None:
    """Let our operations do the attention of a DeepSeek V4 model of transformers.

    Parameters
    ----------
    model : DeepseekV4ForCausalLM, or a model that has a DeepseekV4Model inside
        Changed in place.
    policy : mapping from type of layer to Policy, optional
        As :func:`v4_policies` returns, changed. Default: the model's own strides: the same results.
    score : Score, optional
        What scores the ids of the tokens, for policies with a ``BoundaryRule`` and no score.
    rollback : int >= 0 or None
        How many tokens a cache can take back, as in :class:`dynchunk.cache.Cache`.
    """
    decoder = _decoder(model)
    policies = checked_policies(decoder.config, policy)
    of_layers = tuple(policies[kind] for kind in decoder.config.layer_types)
    for policy_, layer in zip(of_layers, decoder.layers, strict=True):
        if type(layer.self_attn) is not theirs.DeepseekV4Attention:
            expected = "a DeepseekV4Attention that is not wrapped"
            raise TypeError(f"model: expected {expected}, got {describe(layer.self_attn)}")
    for policy_, layer in zip(of_layers, decoder.layers, strict=True):
        layer.self_attn.__class__, layer.self_attn.policy = ChunkedV4Attention, policy_
    decoder._dynchunk = V4Settings(of_layers, score, rollback)
    decoder._dynchunk_hooks = (
        decoder.register_forward_pre_hook(_begin, with_kwargs=True),
        decoder.register_forward_hook(_end, with_kwargs=True),
    )


def unwrap_deepseek_v4(model: Any) -> None:
    """Give a model its own attention back."""
    decoder = _decoder(model)
    for layer in decoder.layers:
        layer.self_attn.__class__ = theirs.DeepseekV4Attention
        del layer.self_attn.policy
    for hook in decoder._dynchunk_hooks:
        hook.remove()
    del decoder._dynchunk, decoder._dynchunk_hooks


def _decoder(model: Any) -> Any:
    found = [m for m in model.modules() if isinstance(m, theirs.DeepseekV4Model)]
    require(len(found) == 1, "model", "one with one DeepseekV4Model inside", model)
    return found[0]


_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "inputs_embeds",
    "use_cache",
)


def _begin(decoder: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Start the step of a forward, before it: the mask gives way to the step."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | given
    settings: V4Settings = decoder._dynchunk
    tokens, x = given.get("input_ids"), given.get("inputs_embeds")
    if (tokens is None) == (x is None):
        return None  # transformers says what is wrong
    if given.get("output_attentions") or decoder.config.output_attentions:
        raise ValueError(
            "output_attentions: a wrapped model makes no matrix of attention weights; "
            "dynchunk.unwrap it to see them"
        )
    cache = _cache(settings, given.get("cache", given.pop("past_key_values", None)))
    first = x if tokens is None else tokens
    ragged = Ragged.of(
        tuple(first.shape[:2]),
        given.get("attention_mask"),
        given.get("position_ids"),
        past=None if cache is None else cache.real,
        device=first.device,
    )
    trains = decoder.training and torch.is_grad_enabled()
    if trains and cache is not None:
        raise ValueError(
            "cache: there is no gradient through a cache; call the model under torch.no_grad(), or "
            "without a cache"
        )
    use_cache = given.get("use_cache")
    if use_cache is None:
        use_cache = decoder.config.use_cache and not ragged.is_packed
    if cache is None and use_cache and not trains:
        cache = settings.new_cache()
    step = settings.step(ragged, tokens, cache)
    own = {"attention_mask": {"step": step}, "cache": cache, "use_cache": cache is not None}
    return (), given | own


def _end(decoder: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
    """Count the tokens of a forward, after it."""
    if given.get("cache") is not None:
        given["cache"].end()


def _cache(settings: V4Settings, cache: Any) -> ChunkedCache | None:
    if cache is None:
        return None
    if not isinstance(cache, ChunkedCache):
        raise TypeError(
            "cache: a wrapped model needs a ChunkedCache, which it makes by itself where none is "
            f"given; got {describe(cache)}"
        )
    same = cache.policies == settings.policies
    require(same, "cache", f"one for {settings.policies}", cache.policies)
    return cache
