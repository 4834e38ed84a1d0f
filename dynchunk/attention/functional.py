"""Attention over chunks as a function: rotate, pool, rotate, attend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.attention.layout import Layout
from dynchunk.attention.policy import Policy
from dynchunk.attention.rope import Rotation, rotate
from dynchunk.attention.specs import Rope
from dynchunk.chunks import Chunks
from dynchunk.ops.attend import attend
from dynchunk.ops.attend_selected import attend_selected
from dynchunk.ops.pool import pool


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    policy: Policy,
    chunks: Chunks | Sequence[Chunks] | Layout,
    *,
    gate: Tensor | None = None,
    slot_bias: Tensor | None = None,
    indices: Tensor | None = None,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Pool the keys and values of each chunk and attend to entries and raw tokens.

    The modules of this package add projections, norms and an indexer; this is what is left without
    weights.

    Parameters
    ----------
    q : floating tensor [S, H, D]
        Packed queries before RoPE: all tokens, or with a ``Layout`` that says so the last ones.
    k : floating tensor [T, H_kv, D]
        Packed keys before RoPE.
    v : floating tensor [T, H_kv, D_v], or None
        None: the keys are the values, and the output is rotated back.
    policy : Policy
        One without overlap, whose second series only a module has.
    chunks : Chunks, a sequence of them, or a Layout
        As :meth:`Layout.of` takes them.
    gate, slot_bias : floating tensors [T, H_kv, D] and [slots, H_kv, D], optional
        Logits of the softmax that pools; one for keys and values. Default: the mean.
    indices : integer tensor [S, K] or [S, H_kv, K], optional
        Entries that each query reads. Default: all visible ones.
    sink : floating tensor [H], optional
    slopes : floating tensor [H], optional
        As in :func:`attend_entries`.
    impl : str, optional
        Of :func:`~dynchunk.ops.attend.attend`.

    Returns
    -------
    tensor [S, H, D_v]

    Examples
    --------
    >>> from dynchunk.boundaries import FixedStride
    >>> x = torch.randn(10, 1, 4, generator=torch.Generator().manual_seed(0))
    >>> policy = Policy(FixedStride(4))
    >>> chunk_attention(x, x, None, policy, Chunks.fixed(4, 10)).shape
    torch.Size([10, 1, 4])
    """
    layout = chunks if isinstance(chunks, Layout) else Layout.of(policy, chunks)
    expected = "a policy without overlap (use ChunkedAttention)"
    require(layout.spans[0].before is None, "policy", expected, policy.reduction)
    entry_k = _pool(k, layout, gate, slot_bias)
    entry_v = None if v is None else _pool(v, layout, gate, slot_bias)
    return attend_entries(
        q,
        k,
        v,
        entry_k,
        entry_v,
        layout,
        policy.rope,
        indices=indices,
        sink=sink,
        slopes=slopes,
        impl=impl,
    )


def attend_entries(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Sequence[Tensor],
    entry_v: Sequence[Tensor] | None,
    layout: Layout,
    rope: Rope | None,
    *,
    indices: Tensor | None = None,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend to entries that are there already: everything before RoPE, entries one per view.

    ``slopes`` [H] add ``-slope * distance`` to the logits of raw tokens, not to those of entries.
    Two more channels do that exactly, without a bias of queries times keys: the query holds
    (slope, -slope * its position) and a raw key (its position, 1), in units of the logits' scale;
    an entry holds zeros. Queries and keys become float32 at least for that, and the product of
    slope and position is rounded there: logits are off by some 1e-7 slope * position.

    ``impl`` is that of :func:`~dynchunk.ops.attend.attend`, where all visible entries are read.

    Returns
    -------
    tensor [S, H, D_v]
    """
    scale, width, dtype = q.shape[-1] ** -0.5, q.shape[-1], q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rotation = Rotation.of(layout.query_position, rope, width, dtype)
    q, k = rotation.turn(q), rotate(k, layout.position, rope)
    at = zip(entry_k, layout.entry_position, strict=True)
    entry_k = [rotate(entry, position, rope) for entry, position in at]
    if slopes is not None:
        q = slope_queries(q.to(wide), slopes / scale, layout.query_position)
        k = slope_keys(k.to(wide), layout.position)
        entry_k = [slope_entries(entry.to(wide)) for entry in entry_k]
    bias = None if layout.bias is None else [b.to(wide) for b in layout.bias]
    if indices is None:
        result = attend(
            q, k, v, entry_k, entry_v, layout.reads, bias=bias, sink=sink, scale=scale, impl=impl
        )
    else:
        result = attend_selected(
            q, k, v, entry_k, entry_v, indices, layout.reads, bias=bias, sink=sink, scale=scale
        )
    out = result.out.to(dtype)
    if v is not None:
        return out
    return rotation.turn_back(out[..., :width])


def slope_queries(q: Tensor, slopes: Tensor, position: Tensor) -> Tensor:
    """Add the two channels of slopes [H], in units of the logits' scale, to queries."""
    at = position.to(q.dtype)[:, None]
    channels = torch.stack([slopes.expand(q.shape[:2]), -slopes * at], -1)
    return torch.cat([q, channels.to(q.dtype)], -1)


def slope_keys(k: Tensor, position: Tensor) -> Tensor:
    """Add the two channels that queries with slopes read of raw tokens."""
    at = position.to(k.dtype)[:, None].expand(k.shape[:2])
    return torch.cat([k, torch.stack([at, torch.ones_like(at)], -1)], -1)


def slope_entries(entry_k: Tensor) -> Tensor:
    """Add the two channels that queries with slopes read of entries: nothing."""
    return torch.nn.functional.pad(entry_k, (0, 2))


def _pool(x: Tensor, layout: Layout, gate: Tensor | None, slot_bias: Tensor | None) -> list[Tensor]:
    """Pool raw keys or values, each view its heads."""
    heads = x.shape[1] // len(layout.views)
    split = [slice(g * heads, (g + 1) * heads) for g in range(len(layout.views))]
    return [
        pool(
            x[:, part],
            spans,
            gate=None if gate is None else gate[:, part],
            slot_bias=None if slot_bias is None else slot_bias[:, part],
        )
        for part, spans in zip(split, layout.spans, strict=True)
    ]
