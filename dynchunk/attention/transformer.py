"""A small causal language model in Qwen3's style whose layers compress by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dynchunk._checks import require, require_int
from dynchunk.attention.chunked import ChunkedAttention
from dynchunk.attention.compressor import EPS
from dynchunk.attention.config import ModelConfig
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmented, Segmenter
from dynchunk.attention.streaming import LayerState, ModelState
from dynchunk.chunks import Chunks, SequenceOffsets, as_cu_seqlens, cu_seqlens_from_mask

#: Chunks given to a model: of one score, or of a score and of each view on another.
Given = Chunks | Sequence[Chunks]


class Output(NamedTuple):
    """What a model returns."""

    logits: Tensor  #: [T, vocab], or [B, L, vocab] with zeros on padding
    views: tuple[tuple[Chunks, ...], ...]  #: the chunks of each layer's views
    ratio_loss: Tensor | None  #: H-Net's, mean over routers; None without one
    index_loss: Tensor | None  #: mean over layers with an indexer; None without one or gradients

    @property
    def ratios(self) -> tuple[float, ...]:
        """Tokens per entry of each layer, measured; NaN without entries."""
        return tuple(sum(view.ratio for view in views) / len(views) for views in self.views)


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each on the norm of the residual stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=EPS)
        self.attention = ChunkedAttention(
            config.policy(layer),
            config.dim,
            config.heads,
            config.kv_heads,
            config.head_dim,
            shared_kv=config.shared_kv,
            qk_norm=config.qk_norm,
            slopes=config.slopes,
        )
        self.mlp_norm = nn.RMSNorm(config.dim, eps=EPS)
        self.mlp = SwiGLU(config.dim, config.mlp_dim or 3 * config.dim)

    def forward(
        self, x: Tensor, layout: Layout, impl: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream of the queries [S, dim] and the loss of the indexer."""
        mixed, index_loss = self.attention(self.attention_norm(x), layout, impl=impl)
        x = layout.queries(x) + mixed
        return x + self.mlp(self.mlp_norm(x)), index_loss

    def stream(self, x: Tensor, cache: LayerState, impl: str | None = None) -> Tensor:
        """Return the residual stream of new tokens [S, dim], whose past is in the cache."""
        mixed, _ = self.attention(self.attention_norm(x), cache=cache, impl=impl)
        x = x + mixed
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ChunkedTransformer(nn.Module):
    """Causal language model with chunk-compressed attention.

    Layer 0's boundaries are scored on the embeddings, which have read one token each; a later
    leader's on its input, whose reach is unbounded.

    Parameters
    ----------
    config : ModelConfig

    Examples
    --------
    >>> from dynchunk.boundaries import FixedStride
    >>> policy = Policy(FixedStride(4), window=8)
    >>> model = ChunkedTransformer(
    ...     ModelConfig(vocab=10, dim=8, layers=2, heads=2, kv_heads=1, pattern=(policy,))
    ... )
    >>> out = model(torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 9, 1]]))
    >>> out.logits.shape, out.ratios
    (torch.Size([2, 6, 10]), (4.0, 4.0))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        self.segmenters = nn.ModuleDict(
            {str(one): Segmenter(config.policy(one), config.dim) for one in config.plan.groups}
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=EPS)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: SequenceOffsets | None = None,
        *,
        mask: Tensor | None = None,
        chunks: Given | None = None,
        layer_chunks: Sequence[Given | None] | None = None,
        scores: Tensor | None = None,
        log_p: Tensor | None = None,
        last: int | None = None,
        cache: ModelState | None = None,
        impl: str | None = None,
    ) -> Output:
        """Return the logits of the next tokens.

        Parameters
        ----------
        tokens : integer tensor [T] or [B, L]
            Packed token ids, or a batch.
        cu_seqlens : offsets [B+1], optional
            Of packed tokens. Default: one sequence.
        mask : bool or 0/1 integer tensor [B, L], optional
            True on real tokens, padding left or right. What padding holds does not matter.
        chunks : Chunks, or a sequence of them, optional
            Of the packed tokens, for all layers with boundaries in place of the policies' own (a
            grid with random offsets, say). A sequence: those of the policy's score, then those of
            each view on another.
        layer_chunks : sequence [layers], optional
            The same for each layer that leads; None where it makes its own.
        scores : floating tensor [T], optional
            For policies with a rule and no score.
        log_p : floating tensor [T], optional
            Bias of the entries of chunks that start at each token, for chunks or scores given. To
            stay causal, it may read tokens up to the one at which the chunk's entry is readable.
        last : int >= 1, optional
            Only the logits of so many last tokens of each packed sequence, which spares the last
            layer the others.
        cache : Cache, optional
            Made for this model, ``Cache.of(model.config, batch)``: the sequences so far, of which
            ``tokens`` has the next ones, for some sequences perhaps none. Logits are the same as
            those of all tokens at once, without a gradient; ``views`` is empty. Chunks and
            ``log_p`` cannot be given.
        impl : str, optional
            Of :func:`~dynchunk.ops.attend.attend`: "batched" is fast for short sequences on a CPU.

        Returns
        -------
        Output
        """
        packed, cu, real = _pack(tokens, cu_seqlens, mask)
        if cache is not None:
            for name, value in (("chunks", chunks), ("layer_chunks", layer_chunks)):
                require(value is None, name, "None with a cache", value)
            require(log_p is None, "log_p", "None with a cache", log_p)
            cu_last = None if last is None else _last(last, cu, tokens)
            logits = self._stream(packed, cu, scores, cache, cu_last, impl)
            return Output(_unpack(logits, real), (), None, None)
        given = _for_layers(chunks, layer_chunks, self.config)
        cu_last = None if last is None else _last(last, cu, tokens)
        x = self.embedding(packed)
        segmented: dict[int, Segmented] = {}
        layouts: dict[tuple[int, Policy], Layout] = {}
        views, index_losses = [], []
        for layer, leader in enumerate(self.config.plan.leaders):
            if layer == leader:
                cut = _segmented(given[layer], cu, log_p)
                segmented[layer] = cut or self.segmenters[str(layer)](packed, x, cu, scores, log_p)
            cut, policy = segmented[leader], self.config.policy(layer)
            if (leader, policy) not in layouts:
                layouts[leader, policy] = Layout.of(policy, cut.chunks, log_p=cut.log_p)
            layout = layouts[leader, policy]
            views.append(layout.views)
            if layer == self.config.layers - 1 and cu_last is not None:
                layout = Layout.of(policy, cut.chunks, log_p=cut.log_p, cu_seqlens_q=cu_last)
            x, index_loss = self.blocks[layer](x, layout, impl)
            index_losses.append(index_loss)
        return Output(
            _unpack(self._logits(x), real),
            tuple(views),
            _mean([cut.ratio_loss for cut in segmented.values()]),
            _mean(index_losses),
        )

    @torch.no_grad()
    def _stream(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        scores: Tensor | None,
        cache: ModelState,
        cu_last: Tensor | None,
        impl: str | None,
    ) -> Tensor:
        """Return the logits of new tokens [S], or of the last ones of each sequence."""
        config = self.config
        ours = tuple(config.policy(layer) for layer in range(config.layers))
        same = (cache.policies, cache.leaders) == (ours, config.plan.leaders)
        require(same, "cache", "one for the policies of this model", cache)
        cache.begin(cu_seqlens)
        x = self.embedding(tokens)
        for layer, leader in enumerate(cache.leaders):
            if layer == leader:
                segmenter = cast(Segmenter, self.segmenters[str(layer)])
                cache.segment(layer, segmenter, tokens, x, scores)
            x = cast(Block, self.blocks[layer]).stream(x, cache.layers[layer], impl)
        if cu_last is not None:
            late = cu_seqlens[1:] - cu_last[1:]
            rows = torch.arange(int(cu_last[-1]), device=x.device)
            x = x[rows + torch.repeat_interleave(late, cu_last.diff())]
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        head = self.embedding if self.head is None else self.head
        return nn.functional.linear(self.norm(x), head.weight)


def _for_layers(
    chunks: Given | None, layer_chunks: Sequence[Given | None] | None, config: ModelConfig
) -> list[Given | None]:
    """Return the chunks given to each layer, None to one without boundaries."""
    given = [chunks] * config.layers if layer_chunks is None else list(layer_chunks)
    require(len(given) == config.layers, "layer_chunks", f"{config.layers} items", layer_chunks)
    is_one = chunks is None or layer_chunks is None
    require(is_one, "layer_chunks", "None beside chunks", layer_chunks)
    without = [config.policy(layer).boundaries is None for layer in range(config.layers)]
    return [None if skip else one for one, skip in zip(given, without, strict=True)]


def _segmented(given: Given | None, cu_seqlens: Tensor, log_p: Tensor | None) -> Segmented | None:
    if given is None:
        return None
    chunks = (given,) if isinstance(given, Chunks) else tuple(given)
    same = all(torch.equal(one.cu_seqlens, cu_seqlens) for one in chunks)
    require(same, "chunks", f"chunks of the sequences {cu_seqlens.tolist()}", given)
    return Segmented(chunks, (log_p,) * len(chunks), None)


def _pack(
    tokens: Tensor, cu_seqlens: SequenceOffsets | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return packed tokens [T], their offsets, and for a batch bool [B, L], True where real."""
    integers = isinstance(tokens, Tensor) and not tokens.is_floating_point()
    require(integers and tokens.ndim in (1, 2), "tokens", "token ids [T] or [B, L]", tokens)
    if tokens.ndim == 1:
        require(mask is None, "mask", "None for packed tokens [T]", mask)
        cu = as_cu_seqlens(len(tokens) if cu_seqlens is None else cu_seqlens, tokens.device)
        fits = int(cu[-1]) == len(tokens)
        require(fits, "cu_seqlens", f"{len(tokens)} (all tokens) at the end", cu.tolist())
        return tokens, cu, None
    require(cu_seqlens is None, "cu_seqlens", "None for tokens [B, L] (use mask)", cu_seqlens)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    require(real.shape == tokens.shape, "mask", f"shape {list(tokens.shape)}", mask)
    cu = cu_seqlens_from_mask(real)
    return tokens[real.bool()], cu, real.bool()


def _last(last: int, cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    require_int("last", last, 1)
    require(tokens.ndim == 1, "last", "None for a batch (pack it)", last)
    return nn.functional.pad(cu_seqlens.diff().clamp(max=last).cumsum(0), (1, 0))


def _unpack(x: Tensor, real: Tensor | None) -> Tensor:
    if real is None:
        return x
    padded = x.new_zeros(*real.shape, x.shape[-1])
    return padded.masked_scatter(real[..., None], x)


def _mean(losses: Sequence[Tensor | None]) -> Tensor | None:
    found = [loss for loss in losses if loss is not None]
    return torch.stack(found).mean() if found else None
