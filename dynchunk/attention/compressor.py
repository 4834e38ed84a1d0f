"""From hidden states to entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dynchunk.attention.layout import Layout
from dynchunk.attention.specs import GatedPool, Reduction
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool

EPS = 1e-6


class Compressor(nn.Module):
    """Pool projections of the hidden states of each chunk, before RoPE.

    Parameters
    ----------
    reduction : GatedPool or MeanPool
    dim : int
        Size of the hidden states.
    heads, head_dim : int
        Of the entries. Heads are split over the views of a layout in order.
    slots : int
        Rows of the slot bias; the last one serves all slots past it.
    norm : bool
        RMSNorm of each entry.

    Examples
    --------
    >>> from dynchunk.attention import hca
    >>> from dynchunk.chunks import Chunks
    >>> compressor = Compressor(hca().reduction, dim=8, heads=1, head_dim=4, slots=3)
    >>> (entries,) = compressor(torch.randn(7, 8), Layout.of(hca(), Chunks.fixed(3, 7)))
    >>> entries.shape
    torch.Size([3, 1, 4])
    """

    def __init__(
        self,
        reduction: Reduction,
        dim: int,
        heads: int,
        head_dim: int,
        slots: int,
        *,
        norm: bool = True,
    ) -> None:
        super().__init__()
        gated = isinstance(reduction, GatedPool)
        series = 2 if isinstance(reduction, GatedPool) and reduction.overlap else 1
        width = series * head_dim
        self.heads, self.width = heads, width
        self.kv_proj = nn.Linear(dim, heads * width, bias=False)
        self.gate_proj = nn.Linear(dim, heads * width, bias=False) if gated else None
        self.slot_bias: nn.Parameter | None = None
        if isinstance(reduction, GatedPool) and reduction.slot_bias:
            self.slot_bias = nn.Parameter(torch.zeros(slots, heads, width))
        self.norm = nn.RMSNorm(head_dim, eps=EPS) if norm else None

    def forward(self, x: Tensor, layout: Layout) -> list[Tensor]:
        """Return the entries [N_g, H / G, head_dim] of each view, from hidden states [T, dim]."""
        return self.pool(x, layout.spans)

    def pool(self, x: Tensor, views: Sequence[Spans]) -> list[Tensor]:
        """Return the same, of spans of the hidden states in each view."""
        values = self.kv_proj(x).unflatten(-1, (self.heads, self.width))
        gate = None
        if self.gate_proj is not None:
            gate = self.gate_proj(x).unflatten(-1, (self.heads, self.width))
        heads = self.heads // len(views)
        entries = []
        for view, spans in enumerate(views):
            part = slice(view * heads, (view + 1) * heads)
            entry = pool(
                values[:, part],
                spans,
                gate=None if gate is None else gate[:, part],
                slot_bias=None if self.slot_bias is None else self.slot_bias[:, part],
                norm=None if self.norm is None else self.norm.weight,
                eps=EPS,
            )
            entries.append(entry)
        return entries
