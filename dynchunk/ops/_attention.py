"""What the attends have in common at the edge: operands, checks, shapes, the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops._registration import wide_dtype
from dynchunk.ops._shapes import check, expand
from dynchunk.ops.layout import Reads

#: Schema of the floating inputs of an attend over entries.
OPERANDS = (
    "Tensor q",
    "Tensor k",
    "Tensor? v",
    "Tensor entry_k",
    "Tensor? entry_v",
    "Tensor? bias",
    "Tensor? sink",
)


class Attended(NamedTuple):
    """What each query got."""

    out: Tensor  #: [S, H, D_v] in the dtype of q; zero for a query that reads nothing
    lse: Tensor  #: [S, H], natural log of the softmax's denominator, sink included; -inf for zero


class Operands(NamedTuple):
    """The floating inputs of an attend; where ``v`` is None, keys are the values too."""

    q: Tensor  #: [S, H, D]
    k: Tensor  #: [T, H_kv, D]
    v: Tensor | None  #: [T, H_kv, D_v]
    entry_k: Tensor  #: [N, H_kv / G, D], the views one after another
    entry_v: Tensor | None  #: [N, H_kv / G, D_v]
    bias: Tensor | None  #: [N, H_kv / G]
    sink: Tensor | None  #: [H]

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        entry_k: Tensor | Sequence[Tensor],
        entry_v: Tensor | Sequence[Tensor] | None,
        bias: Tensor | Sequence[Tensor] | None,
        sink: Tensor | None,
        reads: Reads,
    ) -> Operands:
        """Join the views and verify that all shapes agree."""
        sizes = check_queries(q, k, v, sink, reads)
        entry_k = _join(entry_k)
        check("entry_k", entry_k, "N H_kv/G D", sizes)
        values = None if entry_v is None else _join(entry_v)
        require((v is None) == (values is None), "entry_v", "None exactly where v is None", entry_v)
        if values is not None:
            check("entry_v", values, "N H_kv/G D_v", sizes)
        if bias is not None:
            bias = _join(bias)
            bias = bias[:, None] if bias.ndim == 1 else bias
            bias = expand("bias", bias, (sizes["N"], sizes["H_kv/G"]))
        return cls(q, k, v, entry_k, values, bias, sink)


def check_queries(
    q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, reads: Reads
) -> dict[str, int]:
    """Verify what all attends have; return the sizes."""
    sizes: dict[str, int] = {}
    check("q", q, "S H D", sizes)
    check("k", k, "T H_kv D", sizes)
    if v is not None:
        check("v", v, "T H_kv D_v", sizes)
    if sink is not None:
        check("sink", sink, "H", sizes)
    check("reads.n_visible", reads.n_visible, "G S", sizes, "integer")
    check("reads.raw_start", reads.raw_start, "G S", sizes, "integer")
    check_heads(q, k, sizes)
    return sizes


def check_heads(q: Tensor, k: Tensor, sizes: dict[str, int]) -> None:
    """Verify that KV heads divide the heads and views the KV heads; put H_kv/G into ``sizes``."""
    kv_heads, n_views = sizes["H_kv"], sizes["G"]
    ok = kv_heads > 0 and sizes["H"] % kv_heads == 0
    require(ok, "q", f"a multiple of the {kv_heads} heads of k", q)
    ok = n_views > 0 and kv_heads % n_views == 0
    require(ok, "k", f"a number of heads that {n_views} views divide", k)
    sizes["H_kv/G"] = kv_heads // n_views


def check_rows(x: Operands, cu_q: Tensor, cu_k: Tensor, cu_entries: Tensor) -> None:
    """Verify that operands have the rows that a layout says; reads the layout's tensors."""
    for name, rows, cu in (("q", x.q, cu_q), ("k", x.k, cu_k), ("entry_k", x.entry_k, cu_entries)):
        require(len(rows) == int(cu.max()), name, f"{int(cu.max())} rows, as laid out", rows)


def check_lists(indices: Tensor, k: Tensor, rows: int | None = None) -> Tensor:
    """Return lists of indices as [rows, 1 or H_kv, K]."""
    lists = indices[:, None] if indices.ndim == 2 else indices
    sizes = {"H_kv": k.shape[1]} | ({} if rows is None else {"R": rows})
    is_shared = lists.ndim == 3 and lists.shape[1] == 1
    check("indices", lists, f"R {1 if is_shared else 'H_kv'} K", sizes, "integer")
    return lists


def fake_attended(q: Tensor, k: Tensor, v: Tensor | None, *others: object) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes and dtypes of (out, lse), from the inputs of any attend."""
    floating = (x for x in (q, k, v, *others) if isinstance(x, Tensor) and x.is_floating_point())
    out = q.new_empty(*q.shape[:2], (k if v is None else v).shape[2])
    return out, q.new_empty(q.shape[:2], dtype=wide_dtype(*floating))


def default_scale(scale: float | None, q: Tensor) -> float:
    """Return the factor of the logits, D^-1/2 where none is given."""
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _join(rows: Tensor | Sequence[Tensor]) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.cat(tuple(rows))
