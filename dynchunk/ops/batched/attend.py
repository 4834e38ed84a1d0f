"""Attention over entries and raw tokens by torch's fused CPU attention, all sequences padded.

What that kernel lacks becomes an extra channel, which is one in every query: an entry's key holds
its bias there, and the sink is one more key with a value of zero and no other channel. Without a
sink, that key is read by the queries that read nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynchunk.ops._attention import Operands, check_rows
from dynchunk.ops._registration import wide_dtype

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    x = Operands(q, k, v, entry_k, entry_v, bias, sink)
    if len(q) == 0:  # the fused kernel divides by the number of queries
        return q.new_empty(0, q.shape[1], _width(x)), q.new_empty(q.shape[:2], dtype=wide_dtype(*x))
    found = []
    for part, layout in _views(x, cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start):
        Q, K, V, is_bad = _padded(part, layout, scale)
        out, lse = _fused(Q, K, V, attn_mask=layout.added_mask(part), scale=scale)
        out = out[..., : _width(x)]
        if bool(is_bad.any()):  # a weight of zero does not hide it; whoever reads it gets NaN
            is_nan = (layout.mask & is_bad[:, :, None]).any(-1)
            out = out.masked_fill(is_nan[..., None], torch.nan)
            lse = lse.masked_fill(is_nan, torch.nan)
        if sink is None:
            lse = lse.masked_fill(~layout.mask.any(-1), -torch.inf)
        found.append((layout.rows(out).to(q.dtype), layout.rows(lse)))
    outs, sums = zip(*found, strict=True)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, entry_k, entry_v, bias and sink."""
    x = Operands(q, k, v, entry_k, entry_v, bias, sink)
    if len(q) == 0:
        return tuple(q.new_zeros(0 if t is None else t.shape) for t in x)
    heads = q.shape[1] // len(cu_entries)
    found = []
    views = _views(x, cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start)
    for g, (part, layout) in enumerate(views):
        mine = slice(g * heads, (g + 1) * heads)
        given = (grad_out[:, mine], grad_lse[:, mine], out[:, mine], lse[:, mine])
        found.append(_view_backward(*given, part, layout, scale))
    # Views have heads of their own (of q, k, v), and entries of their own (of the others).
    along = (1, 1, 1, 0, 0, 0, 0)
    return tuple(
        q.new_empty(0) if t is None else torch.cat(grads, dim).to(t.dtype)
        for t, dim, grads in zip(x, along, zip(*found, strict=True), strict=True)
    )


def _view_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    x: Operands,
    layout: _Layout,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of one view's operands."""
    Q, K, V, _ = _padded(x, layout, scale)
    fused = {"attn_mask": layout.added_mask(x), "scale": scale}
    log_sum = layout.padded(lse[..., None])[..., 0]
    log_sum = log_sum.masked_fill(log_sum == -torch.inf, 0)  # its only key has a logit of 0
    grad, result = (
        pad(layout.padded(t), (0, Q.shape[-1] - t.shape[-1])).to(Q.dtype) for t in (grad_out, out)
    )
    dQ, dK, dV = _fused_backward(grad, Q, K, V, result, log_sum, 0.0, False, **fused)
    shift = layout.padded(grad_lse[..., None])
    if x.sink is None:
        shift = shift.where(layout.mask.any(-1, keepdim=True), 0)
    if bool((shift != 0).any()):  # the gradient of the log of a sum is the softmax
        mean, _ = _fused(Q, K, K, **fused)
        dQ = dQ + scale * shift * mean
        given = (scale * shift * Q).contiguous()
        dK = dK + _fused_backward(given, Q, K, K, mean, log_sum, 0.0, False, **fused)[2]
    return _unpadded(dQ, dK, dV, x, layout, scale)


def _views(
    x: Operands,
    cu_q: Tensor,
    cu_k: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    raw_start: Tensor,
) -> Iterator[tuple[Operands, _Layout]]:
    """Yield the operands of each view and their layout."""
    check_rows(x, cu_q, cu_k, cu_entries)
    n = len(cu_entries)
    heads, kv_heads = x.q.shape[1] // n, x.k.shape[1] // n
    queries, tokens = _table(cu_q), _table(cu_k)
    for g, cu in enumerate(cu_entries):
        entries = slice(int(cu[0]), int(cu[-1]))
        of_head, of_kv_head = (slice(g * size, (g + 1) * size) for size in (heads, kv_heads))
        yield (
            Operands(
                x.q[:, of_head],
                x.k[:, of_kv_head],
                None if x.v is None else x.v[:, of_kv_head],
                x.entry_k[entries],
                None if x.entry_v is None else x.entry_v[entries],
                None if x.bias is None else x.bias[entries],
                None if x.sink is None else x.sink[of_head],
            ),
            _Layout.of(queries, tokens, _table(cu - cu[0]), n_visible[g], raw_start[g], cu_q, cu_k),
        )


class _Layout(NamedTuple):
    """Rows of one view's padded tensors: L queries, E entries, S raw tokens."""

    queries: Tensor  #: int64 [B, L], row of each query; any row where it is padding
    is_query: Tensor  #: bool [B, L]
    entries: Tensor  #: int64 [B, E]
    is_entry: Tensor  #: bool [B, E]
    tokens: Tensor  #: int64 [B, S]
    is_token: Tensor  #: bool [B, S]
    mask: Tensor  #: bool [B, 1, L, E + S], what is read

    @classmethod
    def of(
        cls,
        of_queries: tuple[Tensor, Tensor],
        of_tokens: tuple[Tensor, Tensor],
        of_entries: tuple[Tensor, Tensor],
        n_visible: Tensor,
        raw_start: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
    ) -> _Layout:
        (queries, is_query), (tokens, is_token) = of_queries, of_tokens
        entries, is_entry = of_entries
        own = queries + (cu_k[1:] - cu_q[1:])[:, None]
        index = torch.arange(entries.shape[1], device=entries.device)
        sees = (index < n_visible[queries, None]) & is_entry[:, None]
        is_raw = (tokens[:, None] <= own[..., None]) & (tokens[:, None] >= raw_start[queries, None])
        mask = torch.cat([sees, is_raw & is_token[:, None]], -1) & is_query[..., None]
        return cls(queries, is_query, entries, is_entry, tokens, is_token, mask[:, None])

    def added_mask(self, x: Operands) -> Tensor:
        """Return the mask with the sink's column, as what is added to logits."""
        if x.sink is None:
            extra = ~self.mask.any(-1, keepdim=True)
        else:
            extra = self.mask.new_ones(*self.mask.shape[:3], 1)
        mask = torch.cat([self.mask, extra], -1)
        zero = x.q.new_zeros((), dtype=wide_dtype(*x))
        return torch.where(mask, zero, -torch.inf)

    def padded(self, x: Tensor) -> Tensor:
        """Gather rows [S, H, C] of queries to [B, H, L, C], zero on padding."""
        return x[self.queries].where(self.is_query[..., None, None], 0).transpose(1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """Return [B, H, L, ..] as the rows [S, H, ..] of queries."""
        return x.transpose(1, 2)[self.is_query]


def _padded(x: Operands, layout: _Layout, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Q [B, H, L, C], K and V [B, H, E + S + 1, C], and which rows are not finite."""
    wide, D = wide_dtype(*x), x.q.shape[2]
    C = max(D + 1, _width(x))
    heads = x.q.shape[1]
    Q = pad(pad(layout.padded(x.q.to(wide)), (0, 1), value=1.0), (0, C - D - 1))

    def gathered(of_entries: Tensor, of_tokens: Tensor) -> Tensor:
        entries = of_entries[layout.entries].where(layout.is_entry[..., None, None], 0)
        tokens = of_tokens[layout.tokens].where(layout.is_token[..., None, None], 0)
        return torch.cat([entries, tokens], 1).to(wide).transpose(1, 2)  # [B, H_kv, E + S, ..]

    def finished(rows: Tensor) -> Tensor:
        rows = pad(rows, (0, C - rows.shape[-1], 0, 1))
        return rows.repeat_interleave(heads // rows.shape[1], 1)

    K, is_bad = _finite(gathered(x.entry_k, x.k))
    V = K
    if x.v is not None and x.entry_v is not None:
        V, also_bad = _finite(gathered(x.entry_v, x.v))
        is_bad = is_bad | also_bad
    if x.bias is not None:
        bias, _ = _finite(gathered(x.bias[..., None], x.k.new_zeros(*x.k.shape[:2], 1)))
        K = torch.cat([K, bias / scale], -1)
    K, V = finished(K), finished(V)
    if x.sink is not None:
        K[:, :, -1, D] = x.sink.to(wide) / scale
    return Q, K, V, is_bad.repeat_interleave(heads // is_bad.shape[1], 1)


def _unpadded(
    dQ: Tensor, dK: Tensor, dV: Tensor, x: Operands, layout: _Layout, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of the operands from those of what :func:`_padded` made of them."""
    D, E = x.q.shape[2], layout.entries.shape[1]

    def scattered(grad: Tensor, of_entries: Tensor, of_tokens: Tensor) -> tuple[Tensor, Tensor]:
        of_kv = grad.reshape(len(grad), of_tokens.shape[1], -1, *grad.shape[2:]).sum(2)
        rows = of_kv.transpose(1, 2)  # [B, E + S + 1, H_kv, ..]
        d_entries, d_tokens = grad.new_zeros(of_entries.shape), grad.new_zeros(of_tokens.shape)
        d_entries[layout.entries[layout.is_entry]] = rows[:, :E][layout.is_entry]
        d_tokens[layout.tokens[layout.is_token]] = rows[:, E:-1][layout.is_token]
        return d_entries, d_tokens

    d_entry_k, d_k = scattered(dK[..., :D], x.entry_k, x.k)
    d_entry_v, d_v = scattered(
        dV[..., : _width(x)],
        x.entry_k if x.entry_v is None else x.entry_v,
        x.k if x.v is None else x.v,
    )
    if x.v is None:
        d_entry_k, d_k = d_entry_k + d_entry_v, d_k + d_v
    d_bias = None
    if x.bias is not None:
        rows = x.k.new_empty(*x.k.shape[:2], 1)
        d_bias = scattered(dK[..., D : D + 1], x.bias[..., None], rows)[0][..., 0] / scale
    grads = Operands(
        layout.rows(dQ[..., :D]),
        d_k,
        None if x.v is None else d_v,
        d_entry_k,
        None if x.v is None else d_entry_v,
        d_bias,
        None if x.sink is None else dK[:, :, -1, D].sum(0) / scale,
    )
    return tuple(dQ.new_empty(0) if grad is None else grad for grad in grads)


def _table(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of each sequence, int64 [B, longest], and which are real."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    index = torch.arange(longest, device=cu_seqlens.device)
    is_real = index < lengths[:, None]
    return (cu_seqlens[:-1, None] + index).where(is_real, 0), is_real


def _width(x: Operands) -> int:
    return (x.k if x.v is None else x.v).shape[2]


def _finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows with zeros for what is not finite, and which rows had that."""
    is_finite = x.isfinite()
    return x.where(is_finite, 0), ~is_finite.all(-1)
