"""One softmax over entries, raw tokens and sink: what all attends have in common.

Each sequence is a dense matrix of logits under a mask, computed alone, so that no other sequence
changes a bit of it. Rows that a query does not read may hold anything, NaN included.

Letters in einsums: k KV head, r query head of that KV head, l query, s row, d and v channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk.ops._attention import Operands, check_rows
from dynchunk.ops._registration import wide_dtype


class Part(NamedTuple):
    """The queries of one sequence in one of G views, and the rows that they may concern."""

    view: int
    sequence: int
    queries: slice
    tokens: slice
    entries: slice
    heads: slice
    kv_heads: slice


#: What the queries of a part read, bool [1 or kv heads, queries, entries + tokens].
Mask = Callable[[Part], Tensor]


def parts(x: Operands, cu_q: Tensor, cu_k: Tensor, cu_entries: Tensor) -> Iterator[Part]:
    """Yield the parts that have queries, view after view."""
    check_rows(x, cu_q, cu_k, cu_entries)
    heads, kv_heads = x.q.shape[1] // len(cu_entries), x.k.shape[1] // len(cu_entries)
    for g, cu_view in enumerate(cu_entries):
        of_head, of_kv_head = (slice(g * n, (g + 1) * n) for n in (heads, kv_heads))
        all_slices = zip(_slices(cu_q), _slices(cu_k), _slices(cu_view), strict=True)
        for b, (queries, tokens, entries) in enumerate(all_slices):
            if queries.start < queries.stop:
                yield Part(g, b, queries, tokens, entries, of_head, of_kv_head)


def entry_mask(part: Part, n_visible: Tensor) -> Tensor:
    """Return which entries each query sees, bool [queries, entries]."""
    entry = torch.arange(part.entries.stop - part.entries.start, device=n_visible.device)
    return entry < n_visible[part.view, part.queries, None]


def listed_mask(part: Part, lists: Tensor, size: int) -> Tensor:
    """Return which of ``size`` things a part's lists [S, 1 or H_kv, K] hold, bool as a Mask."""
    shared = lists.shape[1] == 1
    listed = lists[part.queries, slice(None) if shared else part.kv_heads].transpose(0, 1).long()
    listed = listed.where((listed >= 0) & (listed < size), size)
    mask = listed.new_zeros(*listed.shape[:2], size + 1, dtype=torch.bool)
    return mask.scatter_(-1, listed, True)[..., :size]


def causal_mask(part: Part, device: torch.device) -> Tensor:
    """Return which raw tokens are not after each query's own, bool [queries, tokens]."""
    token = torch.arange(part.tokens.start, part.tokens.stop, device=device)
    last = part.tokens.stop - part.queries.stop
    own = torch.arange(part.queries.start + last, part.queries.stop + last, device=device)
    return token <= own[:, None]


def raw_mask(part: Part, raw_start: Tensor) -> Tensor:
    """Return which raw tokens each query reads by position, bool [queries, tokens]."""
    token = torch.arange(part.tokens.start, part.tokens.stop, device=raw_start.device)
    is_late = token >= raw_start[part.view, part.queries, None]
    return is_late & causal_mask(part, raw_start.device)


def attend(
    x: Operands, all_parts: Iterator[Part], mask_of: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out [S, H, D_v], lse [S, H])."""
    out = x.q.new_zeros(*x.q.shape[:2], (x.k if x.v is None else x.v).shape[2])
    lse = x.q.new_full(x.q.shape[:2], -torch.inf, dtype=wide_dtype(*x))
    for part in all_parts:
        rows, mask = _rows(x, part), mask_of(part)
        logits = _logits(rows, mask, scale)
        log_sum = torch.cat([rows.sink.expand(*logits.shape[:3], 1), logits], -1).logsumexp(-1)
        weights = _exp(logits, log_sum[..., None]).where(mask[:, None], 0)
        result = torch.einsum("krls,ksv->krlv", weights, _finite(rows.v))
        # A weight of zero does not hide a value that is not finite; whoever reads one gets NaN.
        is_tainted = (mask & ~rows.v.isfinite().all(-1)[:, None]).any(-1)
        result = result.masked_fill(is_tainted[:, None, :, None], torch.nan)
        out[part.queries, part.heads] = _ungroup(result).to(out.dtype)
        lse[part.queries, part.heads] = _ungroup(log_sum[..., None])[..., 0]
    return out, lse


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    x: Operands,
    all_parts: Iterator[Part],
    mask_of: Mask,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of the operands, an empty tensor for each that is None."""
    wide = wide_dtype(*x)
    total = Operands._make(None if t is None else x.q.new_zeros(t.shape, dtype=wide) for t in x)
    for part in all_parts:
        rows, mask = _rows(x, part), mask_of(part)
        grad, result = (_group(t[part.queries, part.heads], rows.sink) for t in (grad_out, out))
        log_sum, shift = (
            _group(t[part.queries, part.heads, None], rows.sink) for t in (lse, grad_lse)
        )
        shift = shift - (grad * result).sum(-1, keepdim=True)
        weights = _exp(_logits(rows, mask, scale), log_sum).where(mask[:, None], 0)
        grad_weights = torch.einsum("krlv,ksv->krls", grad, _finite(rows.v))
        grad_logits = (weights * (grad_weights + shift)).where(mask[:, None], 0)
        grad_rows = _Rows(
            q=torch.einsum("krls,ksd->krld", grad_logits, _finite(rows.k)) * scale,
            k=torch.einsum("krls,krld->ksd", grad_logits, _finite(rows.q)) * scale,
            v=torch.einsum("krls,krlv->ksv", weights, grad),
            bias=grad_logits.sum((1, 2)),
            sink=(_exp(rows.sink, log_sum) * shift).sum(2, keepdim=True),
        )
        _add(grad_rows, part, total)
    return tuple(
        x.q.new_empty(0) if t is None or g is None else g.to(t.dtype)
        for t, g in zip(x, total, strict=True)
    )


class _Rows(NamedTuple):
    """What a part reads: entries first, then raw tokens (s)."""

    q: Tensor  #: [k, r, l, d]
    k: Tensor  #: [k, s, d]
    v: Tensor  #: [k, s, v]
    bias: Tensor  #: [k, s], zero on raw tokens
    sink: Tensor  #: [k, r, 1, 1], -inf where there is none


def _rows(x: Operands, part: Part) -> _Rows:
    wide = wide_dtype(*x)

    def read(of_entries: Tensor, of_tokens: Tensor) -> Tensor:
        tokens = of_tokens[part.tokens, part.kv_heads]
        return torch.cat([of_entries[part.entries], tokens]).to(wide).transpose(0, 1)

    k = read(x.entry_k, x.k)
    v = k if x.v is None or x.entry_v is None else read(x.entry_v, x.v)
    bias = k.new_zeros(k.shape[:2])
    if x.bias is not None:
        of_entries = x.bias[part.entries].T
        bias[:, : of_entries.shape[1]] = of_entries
    sink = x.q.new_full(x.q.shape[1:2], -torch.inf) if x.sink is None else x.sink
    sink = sink[part.heads].to(wide).reshape(len(k), -1, 1, 1)
    return _Rows(_group(x.q[part.queries, part.heads], sink), k, v, bias, sink)


def _add(rows: _Rows, part: Part, total: Operands) -> None:
    """Put gradients of rows where :func:`_rows` reads; only sinks are read by several parts."""
    k, n = rows.k, part.entries.stop - part.entries.start
    if total.v is None or total.entry_v is None:
        k = k + rows.v
    else:
        total.v[part.tokens, part.kv_heads] = rows.v[:, n:].transpose(0, 1)
        total.entry_v[part.entries] = rows.v[:, :n].transpose(0, 1)
    total.k[part.tokens, part.kv_heads] = k[:, n:].transpose(0, 1)
    total.entry_k[part.entries] = k[:, :n].transpose(0, 1)
    total.q[part.queries, part.heads] = _ungroup(rows.q)
    if total.bias is not None:
        total.bias[part.entries] = rows.bias[:, :n].T
    if total.sink is not None:
        total.sink[part.heads] += rows.sink.flatten()


def _logits(rows: _Rows, mask: Tensor, scale: float) -> Tensor:
    logits = torch.einsum("krld,ksd->krls", rows.q, rows.k) * scale
    logits = logits + rows.bias[:, None, None]
    return logits.where(mask[:, None], -torch.inf)


def _exp(logits: Tensor, log_sum: Tensor) -> Tensor:
    """Softmax weights; zero where the sum is, for a query that sees nothing."""
    return (logits - log_sum.masked_fill(log_sum == -torch.inf, 0)).exp()


def _finite(x: Tensor) -> Tensor:
    return x.where(x.isfinite(), 0)


def _group(x: Tensor, sink: Tensor) -> Tensor:
    """View [l, heads, c] as [k, r, l, c], wide."""
    return x.reshape(len(x), *sink.shape[:2], x.shape[-1]).permute(1, 2, 0, 3).to(sink.dtype)


def _ungroup(x: Tensor) -> Tensor:
    """View [k, r, l, c] as [l, heads, c]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _slices(cu_seqlens: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(cu_seqlens.tolist())]
