"""Attention of torch that follows a policy: a function, and ``nn.MultiheadAttention`` in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dynchunk._checks import require
from dynchunk.attention.functional import chunk_attention
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter
from dynchunk.boundaries import BoundaryRule
from dynchunk.boundaries.scores.base import Score
from dynchunk.cache import Cache
from dynchunk.cache.layer import require_weightless
from dynchunk.integrations.hf.ragged import Ragged


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: Policy,
    *,
    tokens: Tensor | None = None,
    scores: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Causal self-attention of whole sequences, as ``scaled_dot_product_attention`` takes them.

    Differentiable, for policies whose entries are means; those that choose raw tokens (``Quest``,
    ``Evict``) run without a gradient. For sequences that grow there is
    :class:`dynchunk.cache.Cache`.

    Parameters
    ----------
    q : floating tensor [B, H, T, D]
    k : floating tensor [B, H_kv, T, D]
    v : floating tensor [B, H_kv, T, D_v]
    policy : Policy
        One without weights. Its ``rope``, if any, rotates queries, raw keys and entries.
    tokens : integer tensor [B, T], optional
        Ids, which a ``Hash`` or ``TokenClasses`` scores.
    scores : floating tensor [B, T], optional
        For a policy with a ``BoundaryRule`` and no score of its own.
    mask : bool or integer tensor [B, T], optional
        Nonzero: a real token. Padding attends to nothing, and is attended to by nothing.
    sink : floating tensor [H], optional
    scale : float, optional
        Default: D^-1/2.
    impl : str, optional
        Of the operations.

    Returns
    -------
    tensor [B, H, T, D_v]
        Zero on padding.

    Examples
    --------
    >>> from dynchunk.attention import full
    >>> q = k = v = torch.randn(2, 4, 10, 8)
    >>> expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(attend(q, k, v, full(rope=None)), expected, atol=1e-5)
    True
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.ndim == 4 and x.is_floating_point(), name, "[B, H, T, D]", x)
    batch, length = q.shape[0], q.shape[2]
    for name, x in (("k", k), ("v", v)):
        same = x.shape[0] == batch and x.shape[2] == length
        require(same, name, f"{batch} sequences of {length} tokens, as q", x)
    require_weightless(replace(policy, rope=None))
    ragged = Ragged.of((batch, length), mask, device=q.device)
    out = _attend_rows(
        *[ragged.pack(x.transpose(1, 2)) for x in (q, k, v)],
        policy=policy,
        cu_seqlens=ragged.cu_seqlens,
        tokens=None if tokens is None else ragged.pack(tokens),
        scores=None if scores is None else ragged.pack(scores),
        sink=sink,
        scale=scale,
        impl=impl,
    )
    return ragged.unpack(out).transpose(1, 2)


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: Policy,
    cu_seqlens: Tensor,
    tokens: Tensor | None = None,
    scores: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend in packed rows: q [S, H, D], k [S, H_kv, D], v [S, H_kv, D_v]."""
    if isinstance(policy.boundaries, BoundaryRule):
        missing = tokens is None if policy.score is not None else scores is None
        name = "tokens" if policy.score is not None else "scores"
        require(not missing, name, "what the policy's boundaries follow", None)
    hidden = q.new_zeros(len(q), 0)
    if tokens is None:
        tokens = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    segmenter = Segmenter(policy, 1)
    if policy.keeps_raw_chunks:
        kind = type(policy.reduction).__name__
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        require(not needs, "q", f"no gradient (torch.no_grad()) with {kind}", q)
        cache = Cache(policy, len(cu_seqlens) - 1, rollback=0, device=q.device)
        cache.begin(cu_seqlens)
        cache.segment(0, segmenter, tokens, hidden, scores)
        return cache.layers[0].mix(q, k, v, sink=sink, scale=scale, impl=impl)
    found = segmenter(tokens, hidden, cu_seqlens.to(q.device), scores)
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    return chunk_attention(q, k, v, policy, Layout.of(policy, found.chunks), sink=sink, impl=impl)


class ChunkedMultiheadAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` that :func:`attach` has changed: causal self-attention.

    The weights are those that it had. A forward has to say ``is_causal=True``, for it is; and
    ``query``, ``key`` and ``value`` have to be one tensor.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Mix; arguments as in ``nn.MultiheadAttention``, the weights of tokens are None.

        Parameters
        ----------
        query, key, value : floating tensors [B, T, E], or [T, B, E], or [T, E]
        key_padding_mask : bool tensor [B, T], optional
            True on padding.
        need_weights, average_attn_weights : bool
            Not read: entries stand for several tokens.
        attn_mask : tensor, optional
            Not read, for ``is_causal`` says what it is.
        is_causal : bool
        """
        same = query is key and key is value
        require(same, "key, value", "the query itself: only self-attention is built", key)
        require(is_causal, "is_causal", "True: a policy is causal", is_causal)
        dropout = self.dropout if self.training else 0.0
        require(dropout == 0, "dropout", "0 in training", dropout)
        x = query[None] if query.ndim == 2 else query
        x = x if self.batch_first or query.ndim == 2 else x.transpose(0, 1)
        out = self._mix(x, key_padding_mask)
        if query.ndim == 2:
            return out[0], None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _mix(self, x: Tensor, padding: Tensor | None) -> Tensor:
        if padding is not None and padding.is_floating_point():
            padding = padding == -torch.inf  # as nn.TransformerEncoder makes it
        real = None if padding is None else ~padding.bool().reshape(x.shape[:2])
        ragged = Ragged.of((x.shape[0], x.shape[1]), real, device=x.device)
        rows = ragged.pack(x)
        projected = nn.functional.linear(rows, self.in_proj_weight, self.in_proj_bias)
        q, k, v = projected.reshape(len(rows), 3, self.num_heads, -1).unbind(1)
        state: _Attached = self.__dict__["_dynchunk"]
        scores = None
        if state.score is not None:
            scores = state.score(rows.detach(), ragged.cu_seqlens.to(x.device))
        out = _attend_rows(
            q,
            k,
            v,
            policy=state.policy,
            cu_seqlens=ragged.cu_seqlens,
            scores=scores,
            impl=state.impl,
        )
        mixed: Tensor = self.out_proj(out.flatten(1))
        return ragged.unpack(mixed)


class _Attached:
    """What was done to a module, and how to undo it."""

    def __init__(self, module: Any, policy: Policy, score: Score | None, impl: str | None) -> None:
        self.module, self.policy, self.score, self.impl = module, policy, score, impl

    def detach(self) -> None:
        """Leave the module as it was."""
        self.module.__class__ = nn.MultiheadAttention
        self.module._qkv_same_embed_dim = True
        del self.module.__dict__["_dynchunk"]


def attach(
    module: nn.MultiheadAttention,
    policy: Policy,
    *,
    score: Score | None = None,
    impl: str | None = None,
) -> _Attached:
    """Wrap torch's attention; see :func:`dynchunk.wrap`.

    Parameters
    ----------
    module : nn.MultiheadAttention
    policy : Policy
        One without weights, whose boundaries are a fixed stride, or follow ``score``. Its ``rope``
        and ``sink`` are ignored: a model that calls this module has added its positions.
    score : Score, optional
        What scores the packed inputs [S, E] of the module, such as a
        :class:`~dynchunk.boundaries.KeyChangeScore`.
    impl : str, optional

    Examples
    --------
    >>> from dynchunk.attention import full
    >>> layer = nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> x, mask = torch.randn(2, 9, 16), nn.Transformer.generate_square_subsequent_mask(9)
    >>> expected = layer(x, mask, is_causal=True)
    >>> attached = attach(layer.self_attn, full())
    >>> torch.allclose(layer(x, mask, is_causal=True), expected, atol=1e-5)
    True
    >>> attached.detach()
    """
    require(type(module) is nn.MultiheadAttention, "module", "an nn.MultiheadAttention", module)
    plain = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    require(plain, "module", "one size of inputs, no bias_k, no add_zero_attn", module)
    policy = replace(policy, rope=None, sink=False)
    require_weightless(policy)
    views, heads = len(policy.views), module.num_heads
    require(heads % views == 0, "policy: views", f"a number that divides {heads} heads", views)
    by_rule = isinstance(policy.boundaries, BoundaryRule)
    expected = "None with score=...: the module does not see the ids of tokens"
    require(policy.score is None, "policy: score", expected, policy.score)
    require(not by_rule or score is not None, "score", "a Score of the module's inputs", score)
    attached = _Attached(module, policy, score, impl)
    module.__dict__["_dynchunk"] = attached
    module.__class__ = ChunkedMultiheadAttention
    # nn.TransformerEncoderLayer has a fast path of its own for modules where this holds.
    module._qkv_same_embed_dim = False
    return attached
