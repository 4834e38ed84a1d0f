"""DeepSeek V4's attention layer, with chunks of any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynchunk._checks import require
from dynchunk.attention.chunked import Mixed
from dynchunk.attention.compressor import EPS, Compressor
from dynchunk.attention.functional import attend_entries
from dynchunk.attention.indexer import Choice, Choosing, Indexer, index_loss
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import GatedPool
from dynchunk.attention.streaming import LayerState, attend_streaming
from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Spans


@dataclass(frozen=True, slots=True)
class V4Sizes:
    """Sizes of a DeepSeek V4 attention layer; the defaults are V4-Flash's."""

    dim: int = 4096
    heads: int = 64
    head_dim: int = 512
    query_rank: int = 1024
    groups: int = 8
    output_rank: int = 1024


class V4Mixing:
    """What a DeepSeek V4 layer does between its projections, wherever these are.

    A subclass projects and pools; :class:`V4Attention` with weights of its own.
    """

    policy: Policy

    def mix(self, x: Tensor, layout: Layout, impl: str | None = None) -> Mixed:
        """Mix packed hidden states [T, dim] in a layout."""
        total = layout.views[0].num_tokens
        require(x.ndim == 2 and len(x) == total, "x", f"hidden states of {total} tokens", x)
        low_rank, q = self.queries(layout.queries(x))
        kv = self.keys(x)
        entries = [kv.new_zeros(len(layout.views[0]), *kv.shape[1:])]
        if self.policy.boundaries is not None:
            entries = self.entries(x, layout.spans)
        indices, loss = None, None
        if (indexer := self.chooser()) is not None:
            choice = indexer.choose(x.detach(), low_rank.detach(), layout)
            indices, loss = choice.indices[0], self.loss(choice, q, entries, layout)
        out = attend_entries(
            q,
            kv,
            None,
            entries,
            None,
            layout,
            self.policy.rope,
            indices=indices,
            sink=self.sinks_of_heads(),
            impl=impl,
        )
        return Mixed(self.output(out), loss)

    @torch.no_grad()
    def stream(self, x: Tensor, cache: LayerState, impl: str | None = None) -> Tensor:
        """Mix new tokens [S, dim] whose past is in a cache, without a gradient."""
        low_rank, q = self.queries(x)

        def entries(rows: dict[str, Tensor], spans: tuple[Spans, ...]) -> tuple[list[Tensor], None]:
            return self.entries(rows["x"], spans), None

        out = attend_streaming(
            q,
            self.keys(x),
            None,
            x,
            low_rank,
            cache,
            self.policy,
            entries,
            inputs={} if self.policy.boundaries is None else {"x": x},
            indexer=self.chooser(),
            sink=self.sinks_of_heads(),
            impl=impl,
        )
        return self.output(out)

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries' low-rank form, which the indexer reads, and the queries."""
        raise NotImplementedError

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys, which are the values, [T, 1, head_dim] before RoPE."""
        raise NotImplementedError

    def entries(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        """Return the entries [N, 1, head_dim] before RoPE, of spans of the hidden states."""
        raise NotImplementedError

    def chooser(self) -> Choosing | None:
        """Return the indexer, if there is one."""
        raise NotImplementedError

    def loss(
        self, choice: Choice, q: Tensor, entries: list[Tensor], layout: Layout
    ) -> Tensor | None:
        """Return what trains the indexer, None for nothing."""
        return None

    def sinks_of_heads(self) -> Tensor | None:
        """Return the sinks [heads]."""
        raise NotImplementedError

    def output(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [S, heads, head_dim] to [S, dim]."""
        raise NotImplementedError


class V4Attention(V4Mixing, nn.Module):
    """Shared-KV attention with low-rank queries and a grouped low-rank output (DeepSeek V4).

    One KV head is key and value. Queries are projected through ``query_rank``, which the indexer
    reads too; the heads' outputs are rotated back, projected to ``output_rank`` in each of
    ``groups`` groups, then together. At V4's fixed strides this equals transformers'
    ``DeepseekV4Attention``; with other chunks it is V4 without a phase.

    Parameters
    ----------
    policy : Policy
        Of one view, with a gated pool, as the presets have it.
    sizes : V4Sizes

    Examples
    --------
    >>> from dynchunk.attention import hca
    >>> sizes = V4Sizes(dim=16, heads=2, head_dim=16, query_rank=8, groups=2, output_rank=4)
    >>> V4Attention(hca(), sizes)(torch.randn(9, 16), Chunks.fixed(128, 9)).out.shape
    torch.Size([9, 16])
    """

    def __init__(self, policy: Policy, sizes: V4Sizes) -> None:
        super().__init__()
        require(len(policy.views) == 1, "policy", "one view (V4 has one KV head)", policy.views)
        gated = isinstance(policy.reduction, GatedPool)
        require(gated, "policy", "a gated pool", policy.reduction)
        n, width = sizes.heads, sizes.head_dim
        ok = n % sizes.groups == 0
        require(ok, "heads", f"a multiple of {sizes.groups} groups", n)
        self.policy, self.sizes = policy, sizes
        self.q_a_proj = nn.Linear(sizes.dim, sizes.query_rank, bias=False)
        self.q_a_norm = nn.RMSNorm(sizes.query_rank, eps=EPS)
        self.q_b_proj = nn.Linear(sizes.query_rank, n * width, bias=False)
        self.q_b_norm = nn.RMSNorm(width, eps=EPS, elementwise_affine=False)
        self.kv_proj = nn.Linear(sizes.dim, width, bias=False)
        self.kv_norm = nn.RMSNorm(width, eps=EPS)
        of_group = torch.empty(sizes.groups, sizes.output_rank, n // sizes.groups * width)
        self.o_a_weight = nn.Parameter(nn.init.normal_(of_group, std=of_group.shape[-1] ** -0.5))
        self.o_b_proj = nn.Linear(sizes.groups * sizes.output_rank, sizes.dim, bias=False)
        self.sink = nn.Parameter(torch.zeros(n)) if policy.sink else None
        self.compressor: Compressor | None = None
        if policy.boundaries is not None:
            self.compressor = Compressor(policy.reduction, sizes.dim, 1, width, policy.max_length)
        self.indexer = Indexer.of(policy, sizes.dim, sizes.query_rank, width)

    def forward(
        self,
        x: Tensor,
        chunks: Chunks | Sequence[Chunks] | Layout | None = None,
        *,
        cache: LayerState | None = None,
        impl: str | None = None,
    ) -> Mixed:
        """Mix packed hidden states, as :class:`~dynchunk.attention.ChunkedAttention` does.

        Parameters
        ----------
        x : floating tensor [T, dim]
        chunks : Chunks or a Layout
            A layout may have only the last tokens of each sequence as queries, S of them.
        cache : LayerCache, optional
            In place of ``chunks``, as in ChunkedAttention.
        impl : str, optional
            Of :func:`~dynchunk.ops.attend.attend`.

        Returns
        -------
        Mixed
            out [S, dim].
        """
        expected = "either chunks or a cache"
        require((chunks is None) != (cache is None), "chunks", expected, (chunks, cache))
        if cache is not None:
            return Mixed(self.stream(x, cache, impl), None)
        assert chunks is not None
        layout = chunks if isinstance(chunks, Layout) else Layout.of(self.policy, chunks)
        return self.mix(x, layout, impl)

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries' low-rank form, which the indexer reads, and the queries."""
        low_rank = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(low_rank).unflatten(-1, (self.sizes.heads, self.sizes.head_dim))
        return low_rank, self.q_b_norm(q)

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys, which are the values, [T, 1, head_dim] before RoPE."""
        kv: Tensor = self.kv_norm(self.kv_proj(x))[:, None]
        return kv

    def entries(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        """Return the entries [N, 1, head_dim] before RoPE, of spans of the hidden states."""
        assert self.compressor is not None
        return self.compressor.pool(x, views)

    def chooser(self) -> Choosing | None:
        """Return the indexer, if there is one."""
        return self.indexer

    def loss(
        self, choice: Choice, q: Tensor, entries: list[Tensor], layout: Layout
    ) -> Tensor | None:
        """Return the index loss where there are gradients."""
        if not torch.is_grad_enabled():
            return None
        return index_loss(choice, q, entries, layout, self.policy.rope)

    def sinks_of_heads(self) -> Tensor | None:
        """Return the sinks [heads]."""
        return self.sink

    def output(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [S, heads, head_dim] to [S, dim]."""
        grouped = out.reshape(len(out), *self.o_a_weight.shape[::2])
        low_rank = torch.einsum("tgi,goi->tgo", grouped, self.o_a_weight)
        mixed: Tensor = self.o_b_proj(low_rank.flatten(1))
        return mixed
