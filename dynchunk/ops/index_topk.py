"""The lightning indexer: score all visible entries for a query, keep the k best.

    I[t, s] = scale sum_h w[t, h] relu(q[t, h] . k[s])

Entries come by (score descending, index ascending). Exact zeros are common, so the order of equal
scores decides what is read; here nothing but the score and the index does. (DeepSeek V3.2 and V4.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require_int
from dynchunk.ops._attention import default_scale
from dynchunk.ops._registration import (
    Implementation,
    Schema,
    choose,
    imported,
    register,
    wide_dtype,
)
from dynchunk.ops._shapes import check
from dynchunk.ops.layout import Reads
from dynchunk.ops.reference import index_topk as reference

SCHEMA = Schema(
    differentiable=("Tensor q", "Tensor k", "Tensor weights"),
    constant=(
        "Tensor cu_seqlens_q",
        "Tensor cu_entries",
        "Tensor n_visible",
        "SymInt topk",
        "float scale",
    ),
    outputs=("scores", "indices"),
)


class TopK(NamedTuple):
    """The best entries of each query, best first."""

    scores: Tensor  #: [S, K], float32 at least; -inf = none
    indices: Tensor  #: int64 [S, K], counted from the sequence's first entry; -1 = none


def fake(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes and dtypes of (scores, indices)."""
    indices = n_visible.new_empty(len(q), topk, dtype=torch.int64)
    return q.new_empty(indices.shape, dtype=wide_dtype(q, k, weights)), indices


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.index_topk import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register(
        "index_topk_reference", SCHEMA, reference.index_topk, reference.index_topk_backward, fake
    ),
    "triton": _triton,
    "cpu": register(
        "index_topk_cpu",
        SCHEMA,
        imported("cpu.index_topk", "index_topk"),
        imported("cpu.index_topk", "index_topk_backward"),
        fake,
    ),
}


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    reads: Reads,
    topk: int,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> TopK:
    """Find the visible entries with the highest index scores.

    Parameters
    ----------
    q : floating tensor [S, H, D]
        Packed index queries: the last ones of each sequence.
    k : floating tensor [N, D]
        Index keys, a row for every chunk.
    weights : floating tensor [S, H]
    reads : Reads
        Of one view. Only ``n_visible`` and where sequences lie matter here.
    topk : int >= 0
        Any number; a query that sees fewer entries gets all of them.
    scale : float, optional
        Default: D^-1/2.
    impl : {None, "reference", "cpu", "triton"}
        The reference computes a score in an order of its own, so that neither the batch nor how a
        prompt is split changes a bit of it.

    Returns
    -------
    TopK
        The scores carry a gradient.

    Examples
    --------
    >>> from dynchunk.chunks import Chunks
    >>> k = torch.tensor([[1.0], [2.0], [2.0], [-1.0]])
    >>> reads = Reads.of(Chunks.fixed(1, 4), window=0)
    >>> index_topk(torch.ones(4, 1, 1), k, torch.ones(4, 1), reads, topk=2).indices
    tensor([[ 0, -1],
            [ 1,  0],
            [ 1,  2],
            [ 1,  2]])
    """
    sizes: dict[str, int] = {}
    check("q", q, "S H D", sizes)
    check("k", k, "N D", sizes)
    check("weights", weights, "S H", sizes)
    check("reads.n_visible (of one view)", reads.n_visible, "1 S", sizes, "integer")
    require_int("topk", topk, 0)
    integers = (reads.cu_seqlens_q, reads.cu_entries, reads.n_visible, topk)
    return TopK(
        *choose(impl, OPS, q, k, weights)(q, k, weights, *integers, default_scale(scale, q))
    )
