"""The lightning indexer over a paged cache: the best visible entries of new tokens.

As :mod:`dynchunk.ops.index_topk`, for the few queries of a decode step and without a gradient.
Index keys lie in pages, as entries do in :mod:`dynchunk.ops.decode`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require, require_int
from dynchunk.ops._attention import default_scale
from dynchunk.ops._registration import (
    Implementation,
    Schema,
    choose,
    imported,
    register_forward,
    register_step,
    wide_dtype,
)
from dynchunk.ops._shapes import check
from dynchunk.ops.index_topk import TopK
from dynchunk.ops.reference import decode_topk as reference

SCHEMA = Schema(
    differentiable=(),
    constant=(
        "Tensor q",
        "Tensor k",
        "Tensor weights",
        "Tensor pages",
        "Tensor sequence",
        "Tensor n_visible",
        "SymInt topk",
        "float scale",
    ),
    outputs=("scores", "indices"),
)


def fake(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes and dtypes of (scores, indices)."""
    indices = n_visible.new_empty(len(q), topk, dtype=torch.int64)
    return q.new_empty(indices.shape, dtype=wide_dtype(q, k, weights)), indices


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.decode_topk import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register_forward("decode_topk_reference", SCHEMA, reference.decode_topk, fake),
    "triton": _triton,
    "cpu": register_step(
        "decode_topk_cpu", SCHEMA, imported("cpu.decode_topk", "decode_topk"), fake
    ),
}


def decode_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    topk: int,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> TopK:
    """Find the visible entries in pages with the highest index scores.

    Parameters
    ----------
    q : floating tensor [S, H, D]
        Index queries, one or a few of each sequence.
    k : floating tensor [P, page_size, D]
        Index keys: the pages of all sequences.
    weights : floating tensor [S, H]
    pages, sequence, n_visible
        As in :func:`~dynchunk.ops.decode.decode`, of one view: [1, B, n_pages], [S] and [1, S].
    topk : int >= 0
        Any number; a query that sees fewer entries gets all of them.
    scale : float, optional
        Default: D^-1/2.
    impl : {None, "reference", "cpu", "triton"}

    Returns
    -------
    TopK
        As of :func:`~dynchunk.ops.index_topk.index_topk`, in the same order. No gradient.

    Examples
    --------
    >>> k = torch.tensor([[[-1.0], [0.0]], [[1.0], [2.0]]])  # two pages of two
    >>> pages, sequence, count = torch.tensor([[[1, 0]]]), torch.tensor([0]), torch.tensor([[3]])
    >>> decode_topk(torch.ones(1, 1, 1), k, torch.ones(1, 1), pages, sequence, count, 2).indices
    tensor([[1, 0]])
    """
    sizes: dict[str, int] = {}
    check("q", q, "S H D", sizes)
    check("k", k, "P page_size D", sizes)
    require(sizes["page_size"] > 0, "k", "at least one row in a page", k)
    check("weights", weights, "S H", sizes)
    check("pages (of one view)", pages, "1 B n_pages", sizes, "integer")
    check("sequence", sequence, "S", sizes, "integer")
    check("n_visible (of one view)", n_visible, "1 S", sizes, "integer")
    require_int("topk", topk, 0)
    integers = (pages, sequence, n_visible, topk)
    return TopK(
        *choose(impl, OPS, q, k, weights)(q, k, weights, *integers, default_scale(scale, q))
    )
