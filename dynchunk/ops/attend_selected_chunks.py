"""Attention over the raw tokens of listed chunks, recent raw tokens and a sink in one softmax.

A query reads the union of the chunks in its list and of its recent tokens, each token once and
none after itself. (NSA, arXiv 2502.11089, and MoBA, arXiv 2502.13189, at fixed strides.)
"""

from __future__ import annotations

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require_int
from dynchunk.ops._attention import (
    Attended,
    check_lists,
    check_queries,
    default_scale,
    fake_attended,
)
from dynchunk.ops._registration import Implementation, Schema, choose, register
from dynchunk.ops.layout import Reads
from dynchunk.ops.reference import attend_selected_chunks as reference

SCHEMA = Schema(
    differentiable=("Tensor q", "Tensor k", "Tensor? v", "Tensor? sink"),
    constant=(
        "Tensor cu_seqlens_q",
        "Tensor cu_seqlens_k",
        "Tensor cu_chunks",
        "Tensor starts",
        "Tensor raw_start",
        "Tensor indices",
        "SymInt block",
        "float scale",
    ),
    outputs=("out", "lse"),
)


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.attend_selected_chunks import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register(
        "attend_selected_chunks_reference",
        SCHEMA,
        reference.attend_selected_chunks,
        reference.attend_selected_chunks_backward,
        fake_attended,
    ),
    "triton": _triton,
}


def attend_selected_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    reads: Reads,
    *,
    block: int = 1,
    sink: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Attended:
    """Attend to the raw tokens of listed chunks and the recent raw tokens.

    Parameters
    ----------
    q, k, v, sink, scale
        As in :func:`~dynchunk.ops.attend.attend`.
    indices : int32 or int64 tensor [R, K], [R, 1, K] or [R, H_kv, K]
        Chunks of the block's own sequence, counted from its first, in any order, open ones too; one
        list for all KV heads or one for each (with views, in the numbers of the head's view). A
        list is a set: a chunk counts once. -1, and any index past the last chunk, is none.
    reads : Reads
        Where the chunks are, and the recent tokens: ``Reads.of(chunks, window=..)``.
    block : int >= 1
        Queries that share a list: ``block`` neighbours, counted from the first query of each
        sequence. R is the number of such blocks, S for 1.
    impl : {None, "reference", "triton"}
        "triton" has gradients in float32 for head dims up to 128.

    Returns
    -------
    Attended
        out [S, H, D_v] and lse [S, H]. Logits and sums are float32 at least.

    Examples
    --------
    >>> import torch
    >>> from dynchunk.chunks import Chunks
    >>> x = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(4, 1, 1)
    >>> reads = Reads.of(Chunks.fixed(2, 4), window=1)
    >>> indices = torch.tensor([[-1], [1], [1], [0]])
    >>> attend_selected_chunks(0 * x, x, None, indices, reads).out.flatten()
    tensor([1.0000, 2.0000, 4.0000, 3.6667])
    """
    check_queries(q, k, v, sink, reads)
    require_int("block", block, 1)
    lists = check_lists(indices, k)
    integers = (
        reads.cu_seqlens_q,
        reads.cu_seqlens_k,
        reads.cu_entries,
        reads.starts,
        reads.raw_start,
        lists,
        block,
    )
    return Attended(
        *choose(impl, OPS, q, k, v, sink)(q, k, v, sink, *integers, default_scale(scale, q))
    )
