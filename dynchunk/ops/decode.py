"""Attention of new tokens over a paged cache: entries, raw tokens and a sink in one softmax.

As :mod:`dynchunk.ops.attend` and :mod:`dynchunk.ops.attend_selected`, for the few queries of a
decode step and without a gradient. Entries lie in pages of a fixed size, anywhere in a pool that
all sequences share: entry i of a sequence is row ``i % page_size`` of its page ``i // page_size``.
Raw rows lie in one buffer, each query's own in one run. (Pages: Kwon et al. 2023, PagedAttention,
section 4.)
"""

from __future__ import annotations

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require
from dynchunk.ops._attention import (
    OPERANDS,
    Attended,
    check_heads,
    check_lists,
    default_scale,
    fake_attended,
)
from dynchunk.ops._registration import (
    Implementation,
    Schema,
    choose,
    imported,
    register_forward,
    register_step,
)
from dynchunk.ops._shapes import check
from dynchunk.ops.reference import decode as reference

SCHEMA = Schema(
    differentiable=(),
    constant=(
        *OPERANDS,
        "Tensor pages",
        "Tensor sequence",
        "Tensor n_visible",
        "Tensor raw_begin",
        "Tensor raw_end",
        "Tensor? indices",
        "float scale",
    ),
    outputs=("out", "lse"),
)


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.decode import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register_forward("decode_reference", SCHEMA, reference.decode, fake_attended),
    "triton": _triton,
    "cpu": register_step("decode_cpu", SCHEMA, imported("cpu.decode", "decode"), fake_attended),
}


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    raw_begin: Tensor,
    raw_end: Tensor,
    *,
    indices: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Attended:
    """Attend to the visible entries in pages and to a run of raw rows.

    Nothing but shapes is verified, so that a step costs no synchronisation: what a query reads has
    to be there. Free pages and rows that no query reads may hold anything, NaN included.

    Parameters
    ----------
    q : floating tensor [S, H, D]
        One or a few queries of each sequence.
    k : floating tensor [R, H_kv, D]
        Raw keys of all sequences, in any layout.
    v : floating tensor [R, H_kv, D_v], or None
        None: the keys are the values, ``entry_v`` is None too.
    entry_k : floating tensor [P, page_size, H_kv / G, D]
        The pages of all sequences and of all G views.
    entry_v : floating tensor [P, page_size, H_kv / G, D_v], or None
    pages : int32 or int64 tensor [G, B, n_pages]
        The pages of each sequence's entries, in order; view g has the g-th H_kv / G of the KV
        heads. Slots past the visible entries may hold anything.
    sequence : int32 or int64 tensor [S]
        Sequence of each query.
    n_visible : int32 or int64 tensor [G, S]
        A query reads the entries ``0 .. n_visible - 1`` of its sequence.
    raw_begin, raw_end : int32 or int64 tensors [G, S] and [S]
        A query reads the rows ``raw_begin .. raw_end - 1`` of k.
    indices : int32 or int64 tensor [S, K], [S, 1, K] or [S, H_kv, K], optional
        Of the visible entries a query reads only these. As in
        :func:`~dynchunk.ops.attend_selected.attend_selected`: a set; -1, and any index that is not
        visible, is none.
    bias : floating tensor [P, page_size, H_kv / G], optional
        Added to the entries' logits.
    sink : floating tensor [H], optional
        A logit without a value.
    scale : float, optional
        Default: D^-1/2.
    impl : {None, "reference", "cpu", "triton"}
        "triton" computes in the dtype of the entries; "cpu" copies operands whose last dimension is
        not dense. Neither takes float64. A query's result depends, to the last bit, neither on the
        other queries nor on where its
        pages lie.

    Returns
    -------
    Attended
        out [S, H, D_v] and lse [S, H]. Logits and sums are float32 at least. Zero and -inf for a
        query that reads nothing. No gradient.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 9.0]).reshape(3, 1, 1)  # raw rows
    >>> entry = torch.tensor([[7.0, 8.0], [5.0, 6.0]]).reshape(2, 2, 1, 1)  # two pages of two
    >>> pages, sequence = torch.tensor([[[1, 0]]]), torch.tensor([0])
    >>> n_visible, begin, end = torch.tensor([[3]]), torch.tensor([[1]]), torch.tensor([2])
    >>> q = torch.zeros(1, 1, 1)
    >>> decode(q, x, None, entry, None, pages, sequence, n_visible, begin, end).out.flatten()
    tensor([5.])
    """
    sizes: dict[str, int] = {}
    check("q", q, "S H D", sizes)
    check("k", k, "R H_kv D", sizes)
    check("pages", pages, "G B n_pages", sizes, "integer")
    check_heads(q, k, sizes)
    check("entry_k", entry_k, "P page_size H_kv/G D", sizes)
    require(sizes["page_size"] > 0, "entry_k", "at least one row in a page", entry_k)
    require((v is None) == (entry_v is None), "entry_v", "None exactly where v is None", entry_v)
    if v is not None:
        check("v", v, "R H_kv D_v", sizes)
        check("entry_v", entry_v, "P page_size H_kv/G D_v", sizes)
    if bias is not None:
        check("bias", bias, "P page_size H_kv/G", sizes)
    if sink is not None:
        check("sink", sink, "H", sizes)
    for name, x, dims in (
        ("sequence", sequence, "S"),
        ("n_visible", n_visible, "G S"),
        ("raw_begin", raw_begin, "G S"),
        ("raw_end", raw_end, "S"),
    ):
        check(name, x, dims, sizes, "integer")
    lists = None if indices is None else check_lists(indices, k, len(q))
    operands = (q, k, v, entry_k, entry_v, bias, sink)
    integers = (pages, sequence, n_visible, raw_begin, raw_end, lists)
    return Attended(*choose(impl, OPS, *operands)(*operands, *integers, default_scale(scale, q)))
