"""Self-attention of any policy as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynchunk._checks import require, require_int
from dynchunk.attention.compressor import EPS, Compressor
from dynchunk.attention.functional import attend_entries
from dynchunk.attention.indexer import Indexer, index_loss
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.specs import GatedPool, MeanPool
from dynchunk.attention.streaming import Entries, LayerState, attend_streaming
from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool


class Mixed(NamedTuple):
    """What a layer returns."""

    out: Tensor  #: [S, dim]
    index_loss: Tensor | None  #: what trains the indexer, a scalar; None without one or gradients


class ChunkedAttention(nn.Module):
    """Causal self-attention over entries and raw tokens, as a policy says.

    Query and key heads have an RMSNorm (Qwen3), positions are rotary, entries are rotated at their
    chunk's first token. With ``shared_kv`` one projection gives keys and values, and the output is
    rotated back at the query's position (DeepSeek V4).

    Parameters
    ----------
    policy : Policy
    dim : int
        Size of the hidden states.
    heads : int
    kv_heads : int
        Where the policy's G views do not divide it, each head of queries, keys and values becomes G
        of 1 / G of the channels: views at equal bytes.
    head_dim : int, optional
        Default: dim / heads.
    shared_kv : bool
        Keys are the values.
    qk_norm : bool
    slopes : bool
        Learnable distance slopes for raw tokens, one per head, that start as ALiBi's.

    Examples
    --------
    >>> from dynchunk.boundaries import FixedStride
    >>> policy = Policy(FixedStride(4), window=8)
    >>> layer = ChunkedAttention(policy, dim=16, heads=2, kv_heads=1, shared_kv=True)
    >>> layer(torch.randn(10, 16), Chunks.fixed(4, 10)).out.shape
    torch.Size([10, 16])
    """

    def __init__(
        self,
        policy: Policy,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        *,
        shared_kv: bool = False,
        qk_norm: bool = True,
        slopes: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
            require_int(name, value, 1)
        expected = "one that pools (LayerCache.mix is for this one)"
        require(not policy.keeps_raw_chunks, "policy", expected, policy.reduction)
        require(heads % kv_heads == 0, "heads", f"a multiple of kv_heads = {kv_heads}", heads)
        width = dim // heads if head_dim is None else require_int("head_dim", head_dim, 1)
        views = len(policy.views)
        if kv_heads % views:
            require(width % views == 0, "head_dim", f"a multiple of {views} views", width)
            heads, kv_heads, width = heads * views, kv_heads * views, width // views
        self.policy, self.heads, self.kv_heads, self.head_dim = policy, heads, kv_heads, width
        self.shared_kv = shared_kv
        self.q_proj = nn.Linear(dim, heads * width, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * width, bias=False)
        self.v_proj = None if shared_kv else nn.Linear(dim, kv_heads * width, bias=False)
        self.o_proj = nn.Linear(heads * width, dim, bias=False)
        self.q_norm = nn.RMSNorm(width, eps=EPS) if qk_norm else None
        self.k_norm = nn.RMSNorm(width, eps=EPS) if qk_norm else None
        self.sink = nn.Parameter(torch.zeros(heads)) if policy.sink else None
        self.slopes: nn.Parameter | None = None
        if slopes:
            steps = torch.arange(1, heads + 1, dtype=torch.float32)
            self.slopes = nn.Parameter(2.0 ** (-8 * steps / heads))
        self.compress_k, self.compress_v = self._compressors(dim)
        self.entry_norm: nn.RMSNorm | None = None
        if isinstance(policy.reduction, MeanPool) and not policy.reduction.own:
            self.entry_norm = nn.RMSNorm(width, eps=EPS) if policy.reduction.norm else None
        self.indexer = Indexer.of(policy, dim, dim, width)

    def forward(
        self,
        x: Tensor,
        chunks: Chunks | Sequence[Chunks] | Layout | None = None,
        *,
        cache: LayerState | None = None,
        impl: str | None = None,
    ) -> Mixed:
        """Mix packed hidden states.

        Parameters
        ----------
        x : floating tensor [T, dim]
        chunks : Chunks, a sequence of them, or a Layout
            As :meth:`Layout.of` takes them; for a policy without boundaries, what
            :func:`~dynchunk.attention.layout.one_chunk_each` returns. A ``Layout`` may be shared by
            layers of one policy, and may have only the last tokens of each sequence as queries, S
            of them.
        cache : LayerCache, optional
            In place of ``chunks``: the past of the sequences, of which ``x`` has the tokens that
            were appended to the :class:`~dynchunk.cache.Cache`. No gradient.
        impl : str, optional
            Of :func:`~dynchunk.ops.attend.attend`.

        Returns
        -------
        Mixed
        """
        expected = "either chunks or a cache"
        require((chunks is None) != (cache is None), "chunks", expected, (chunks, cache))
        if cache is not None:
            return Mixed(self._stream(x, cache, impl), None)
        assert chunks is not None
        layout = chunks if isinstance(chunks, Layout) else Layout.of(self.policy, chunks)
        total = layout.views[0].num_tokens
        require(x.ndim == 2 and len(x) == total, "x", f"hidden states of {total} tokens", x)
        query = layout.queries(x)
        q = self._heads(self.q_proj(query), self.q_norm)
        k = self._heads(self.k_proj(x), self.k_norm)
        v = None if self.v_proj is None else self._heads(self.v_proj(x), None)
        entry_k, entry_v = self._entries(x, k, v, layout)
        indices, loss = None, None
        if self.indexer is not None:
            choice = self.indexer(x.detach(), query.detach(), layout)
            heads = self.kv_heads // len(layout.views)
            indices = torch.stack(choice.indices, 1).repeat_interleave(heads, 1)
            if torch.is_grad_enabled():
                loss = index_loss(choice, q, entry_k, layout, self.policy.rope)
        out = attend_entries(
            q,
            k,
            v,
            entry_k,
            entry_v,
            layout,
            self.policy.rope,
            indices=indices,
            sink=self.sink,
            slopes=self.slopes,
            impl=impl,
        )
        return Mixed(self.o_proj(out.flatten(1)), loss)

    @torch.no_grad()
    def _stream(self, x: Tensor, cache: LayerState, impl: str | None) -> Tensor:
        q = self._heads(self.q_proj(x), self.q_norm)
        k = self._heads(self.k_proj(x), self.k_norm)
        v = None if self.v_proj is None else self._heads(self.v_proj(x), None)
        inputs = {} if self.policy.boundaries is None else {"x": x}
        if self.policy.boundaries is not None and self.compress_k is None:
            inputs = {"raw_k": k} | ({} if self.indexer is None else inputs)

        def entries(rows: dict[str, Tensor], spans: tuple[Spans, ...]) -> Entries:
            if self.compress_k is not None:
                return self._compress(rows["x"], spans)
            return self._mean(rows["raw_k"], rows.get("v"), spans)

        out = attend_streaming(
            q,
            k,
            v,
            x,
            x,
            cache,
            self.policy,
            entries,
            inputs=inputs,
            indexer=self.indexer,
            sink=self.sink,
            slopes=self.slopes,
            impl=impl,
        )
        mixed: Tensor = self.o_proj(out.flatten(1))
        return mixed

    def _heads(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        x = x.reshape(len(x), x.shape[-1] // self.head_dim, self.head_dim)
        return x if norm is None else norm(x)

    def _compressors(self, dim: int) -> tuple[Compressor | None, Compressor | None]:
        policy = self.policy
        reduction = policy.reduction
        assert isinstance(reduction, GatedPool | MeanPool)
        own = isinstance(reduction, GatedPool) or reduction.own
        if policy.boundaries is None or not own:
            return None, None
        size = (reduction, dim, self.kv_heads, self.head_dim, policy.max_length)
        of_v = None if self.shared_kv else Compressor(*size, norm=False)
        return Compressor(*size, norm=reduction.norm), of_v

    def _entries(self, x: Tensor, k: Tensor, v: Tensor | None, layout: Layout) -> Entries:
        if self.policy.boundaries is None:
            nothing = [k.new_zeros(len(layout.views[0]), self.kv_heads, self.head_dim)]
            return nothing, None if v is None else nothing
        if self.compress_k is not None:
            return self._compress(x, layout.spans)
        return self._mean(k, v, layout.spans)

    def _compress(self, x: Tensor, spans: tuple[Spans, ...]) -> Entries:
        assert self.compress_k is not None
        of_v = None if self.compress_v is None else self.compress_v.pool(x, spans)
        return self.compress_k.pool(x, spans), of_v

    def _mean(self, k: Tensor, v: Tensor | None, spans: tuple[Spans, ...]) -> Entries:
        heads = self.kv_heads // len(spans)

        def mean(raw: Tensor) -> list[Tensor]:
            views = enumerate(spans)
            return [pool(raw[:, g * heads : (g + 1) * heads], of_view) for g, of_view in views]

        entry_k = mean(k)
        if self.entry_norm is not None:
            entry_k = [self.entry_norm(entries) for entries in entry_k]
        return entry_k, None if v is None else mean(v)
