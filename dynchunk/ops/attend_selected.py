"""Attention over entries that are listed for each query, raw tokens and a sink in one softmax.

As :mod:`dynchunk.ops.attend`, but of the visible entries a query reads only those in its list
(DeepSeek V4's CSA: the top-k of its indexer).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk.ops._attention import (
    OPERANDS,
    Attended,
    Operands,
    check_lists,
    default_scale,
    fake_attended,
)
from dynchunk.ops._registration import Implementation, Schema, choose, imported, register
from dynchunk.ops.layout import Reads
from dynchunk.ops.reference import attend_selected as reference

SCHEMA = Schema(
    differentiable=OPERANDS,
    constant=(
        "Tensor cu_seqlens_q",
        "Tensor cu_seqlens_k",
        "Tensor cu_entries",
        "Tensor n_visible",
        "Tensor raw_start",
        "Tensor indices",
        "float scale",
    ),
    outputs=("out", "lse"),
)


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.attend_selected import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register(
        "attend_selected_reference",
        SCHEMA,
        reference.attend_selected,
        reference.attend_selected_backward,
        fake_attended,
    ),
    "triton": _triton,
    "cpu": register(
        "attend_selected_cpu",
        SCHEMA,
        imported("cpu.attend_selected", "attend_selected"),
        imported("cpu.attend_selected", "attend_selected_backward"),
        fake_attended,
    ),
}


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor | Sequence[Tensor],
    entry_v: Tensor | Sequence[Tensor] | None,
    indices: Tensor,
    reads: Reads,
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Attended:
    """Attend to listed entries and the recent raw tokens.

    Parameters
    ----------
    q, k, v, entry_k, entry_v, bias, sink, scale
        As in :func:`~dynchunk.ops.attend.attend`.
    indices : int32 or int64 tensor [S, K], [S, 1, K] or [S, H_kv, K]
        Entries of the query's own sequence, counted from its first, in any order; one list for all
        KV heads or one for each. A list is a set: an index counts once. -1, and any index that the
        query does not see, is none.
    reads : Reads
        What each query may read: ``Reads.of(chunks, window=..)``.
    impl : {None, "reference", "cpu", "triton"}
        "triton" has gradients in float32 for head dims up to 128.

    Returns
    -------
    Attended
        out [S, H, D_v] and lse [S, H]. Logits and sums are float32 at least.

    Examples
    --------
    >>> import torch
    >>> from dynchunk.chunks import Chunks
    >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> reads = Reads.of(Chunks.fixed(1, 3), window=0)
    >>> indices = torch.tensor([[0, -1], [0, 1], [2, 0]])
    >>> attend_selected(0 * x, x, None, x, None, indices, reads).out.flatten()
    tensor([1.0000, 1.5000, 2.0000])
    """
    operands = Operands.checked(q, k, v, entry_k, entry_v, bias, sink, reads)
    lists = check_lists(indices, k, len(q))
    integers = (
        reads.cu_seqlens_q,
        reads.cu_seqlens_k,
        reads.cu_entries,
        reads.n_visible,
        reads.raw_start,
        lists,
    )
    return Attended(*choose(impl, OPS, *operands)(*operands, *integers, default_scale(scale, q)))
