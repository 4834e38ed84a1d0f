"""What a wrapped model calls in place of its attention and its masks.

Both are registered with transformers under the name ``"dynchunk"``. What one forward needs travels
with it as a keyword argument, from the decoder to every layer: nothing is global, and a layer that
is run a second time for its gradient (checkpointing) finds what it had the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from dynchunk._checks import require
from dynchunk.attention.functional import attend_entries, chunk_attention
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter
from dynchunk.boundaries import BoundaryRule
from dynchunk.boundaries.scores.base import Score
from dynchunk.cache.layer import require_weightless
from dynchunk.integrations.hf.cache import ChunkedCache
from dynchunk.integrations.hf.ragged import Ragged
from dynchunk.integrations.hf.scores import given_scores
from dynchunk.integrations.hf.trainable import POOLING

#: What the attention is called in a config.
NAME = "dynchunk"

_UNSUPPORTED = ("softcap", "position_bias", "attention_bias", "block_table")


class Pooling(NamedTuple):
    """What makes the entries of a layer, where they have weights."""

    module: Any  #: EntryPooling
    x: Tensor  #: [S, dim], the layer's hidden states


@dataclass(eq=False)
class Forward:
    """One forward of a model: what its layers share.

    Attributes
    ----------
    ragged : Ragged
    policies : mapping from layer to Policy
        Other layers are left as they are.
    cache : ChunkedCache or None
        What to read and fill, without a gradient. None: attend to the new tokens alone,
        differentiably.
    tokens : integer tensor [S] or None
        Ids of the new tokens.
    score : Score or None
        As in :class:`~dynchunk.integrations.hf.cache.ChunkedCache`.
    impl : str or None
        Of the operations.
    segmenters : mapping from layer to Segmenter
        Where the boundaries of its policy follow a learned score.
    hidden : floating tensor [S, dim] or None
        What that reads.
    """

    ragged: Ragged
    policies: Mapping[int, Policy]
    cache: ChunkedCache | None
    tokens: Tensor | None
    score: Score | None = None
    impl: str | None = None
    segmenters: Mapping[int, Segmenter] = field(default_factory=dict)
    hidden: Tensor | None = None
    _layouts: dict[int, Layout] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        scale: float | None,
        pooling: Pooling | None = None,
    ) -> Tensor:
        """Return what the new tokens [S, H, D] of a layer read, [S, H, D_v]."""
        if self.cache is None:
            return self._attend_alone(layer, q, k, v, sink, scale, pooling)
        with torch.no_grad():
            options: dict[str, Any] = {"sink": sink, "scale": scale, "impl": self.impl}
            state = self.cache.layer(layer)
            if pooling is None:
                mixed = state.mix(q, k, v, **options)
            else:
                rows = state.extend(k=k, v=v, x=pooling.x)
                if rows is not None and state.step.closed is not None:
                    spans = state.step.closed.spans
                    state.close(*pooling.module(rows["x"], rows["k"], rows["v"], spans))
                mixed = state.attend(q, **options)
        return without_gradient(mixed, q)

    def _attend_alone(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        scale: float | None,
        pooling: Pooling | None,
    ) -> Tensor:
        policy = self.policies[layer]
        require_weightless(policy)
        if policy.keeps_raw_chunks:
            kind = type(policy.reduction).__name__
            raise ValueError(
                f"policy: {kind} chooses raw tokens, which has no gradient here; call the model "
                "under torch.no_grad(), or train with MeanPool entries or full attention"
            )
        if scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)
        layout = self.layout(policy, q.device)
        if pooling is None:
            return chunk_attention(q, k, v, policy, layout, sink=sink, impl=self.impl)
        entry_k, entry_v = pooling.module(pooling.x, k, v, layout.spans)
        return attend_entries(q, k, v, entry_k, entry_v, layout, None, sink=sink, impl=self.impl)

    def layout(self, policy: Policy, device: torch.device) -> Layout:
        """Return what the new tokens read and entries pool where there is no cache, made once."""
        if id(policy) not in self._layouts:
            self._layouts[id(policy)] = self._layout(policy, device)
        return self._layouts[id(policy)]

    def _layout(self, policy: Policy, device: torch.device) -> Layout:
        cu = self.ragged.cu_seqlens
        scores, tokens = None, torch.zeros(int(cu[-1]), dtype=torch.int64, device=device)
        if isinstance(policy.boundaries, BoundaryRule):
            if self.tokens is None:
                raise ValueError(
                    "inputs_embeds: the policy's boundaries follow the ids of the tokens; pass "
                    "input_ids, or a policy of fixed strides"
                )
            tokens = self.tokens
            if policy.score is None:
                scores = given_scores(self.score, tokens, cu)
        learned = [self.segmenters[i] for i in self.segmenters if self.policies[i] is policy]
        segmenter = learned[0] if learned else Segmenter(policy, 1)
        hidden = torch.zeros(len(tokens), 0, device=device) if self.hidden is None else self.hidden
        found = segmenter(tokens, hidden, cu.to(device), scores)
        return Layout.of(policy, found.chunks, log_p=found.log_p)


def required(forward: Forward | None) -> Forward:
    """Return what a layer was handed, or say why it was handed nothing."""
    if forward is None:
        raise RuntimeError(
            "dynchunk: the layer was called without its model, or the model is no longer wrapped: "
            "call the model that dynchunk.wrap returned"
        )
    return forward


def without_gradient(value: Tensor, like: Tensor) -> Tensor:
    """Return a value that was computed with a cache: a backward through it is an error."""
    if not (torch.is_grad_enabled() and like.requires_grad):
        return value
    out: Tensor = _NoGradient.apply(value, like)  # type: ignore[no-untyped-call]
    return out


class _NoGradient(torch.autograd.Function):
    """Pass a value on, and say so where a gradient would have to come back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor) -> Tensor:
        """Return the value."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise."""
        raise RuntimeError(
            "dynchunk: there is no gradient through a cache; call the model with use_cache=False, "
            "or in training mode, where no cache is made"
        )


@torch.compiler.disable  # what the host counts differs from step to step
def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    dynchunk: Forward | None = None,
    dynchunk_states: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the policy of the layer says; transformers' attention function.

    Parameters
    ----------
    module : nn.Module
        The layer's attention.
    query, key, value : floating tensors [B, H, T, D], [B, H_kv, T, D] and [B, H_kv, T, D_v]
        After RoPE; a layer that is left as it is gets those of the past too.
    attention_mask : tensor or None
        Read by layers that are left as they are.
    scaling : float, optional
    dropout : float
    s_aux : floating tensor [H], optional
        Sinks.
    dynchunk : Forward
        What the wrapped decoder hands to its layers.
    dynchunk_states : floating tensor [B, T, dim], optional
        The layer's hidden states, where its entries have weights.

    Returns
    -------
    tuple of tensor [B, T, H, D_v] and None
    """
    forward = required(dynchunk)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer not in forward.policies:
        options = {"scaling": scaling, "dropout": dropout} | kwargs
        options |= {} if s_aux is None else {"s_aux": s_aux}
        found: tuple[Tensor, Tensor | None] = native_attention(module)(
            module, query, key, value, attention_mask, **options
        )
        return found
    require(dropout == 0, "attention_dropout", "0 (set it in the model's config)", dropout)
    for name in _UNSUPPORTED:
        require(kwargs.get(name) is None, name, "None: not supported here", kwargs.get(name))
    ragged = forward.ragged
    q, k, v = (ragged.pack(x.transpose(1, 2)) for x in (query, key, value))
    pooling = None
    if dynchunk_states is not None:
        pooling = Pooling(getattr(module, POOLING), ragged.pack(dynchunk_states))
    out = forward.attend(layer, q, k, v, s_aux, scaling, pooling)
    return ragged.unpack(out).to(query.dtype), None


def make_mask(*, config: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """Make the masks of layers that are left as they are; transformers' mask function.

    Layers with a policy read none: what is padding is in the packed rows, what a query reads in
    the policy, and nothing has the size of T x T.
    """
    found = config.dynchunk
    if not found["needs_mask" if local_size is None else "needs_window_mask"]:
        return None
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    original = masks[found["attn_implementation"]]
    options = kwargs if local_size is None else kwargs | {"local_size": local_size}
    return original(config=config, **options)


def native_attention(module: Any) -> Callable[..., Any]:
    """Return the attention function that a module had before its model was wrapped."""
    original = module.config.dynchunk["attn_implementation"]
    functions: dict[str, Any] = AttentionInterface._global_mapping
    if original == "eager":  # transformers has none of that name: each modeling file has its own
        functions = vars(sys.modules[type(module).__module__])
        original = "eager_attention_forward"
    found: Callable[..., Any] = functions[original]
    return found


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
