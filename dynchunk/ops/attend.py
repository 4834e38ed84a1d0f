"""Attention over compressed entries, raw tokens and a sink in one softmax.

Query t of head h reads a set of entries i and raw tokens j and has a sink z_h:

    out = (sum_i e^{l_i} v_i + sum_j e^{l_j} v_j) / (sum_i e^{l_i} + sum_j e^{l_j} + e^{z_h})
    l_i = scale q . k_i + b_i,    l_j = scale q . k_j

:class:`~dynchunk.ops.layout.Reads` says which: the first ``n_visible[t]`` entries of its sequence
and the raw tokens from ``raw_start[t]`` to itself, in each view. H query heads share H_kv KV heads
in groups of H / H_kv neighbours. With G views, view g has the g-th H_kv / G of the KV heads and
its own entries. (DeepSeek V4: one KV head, keys that are the values too, no bias.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk.ops._attention import OPERANDS, Attended, Operands, default_scale, fake_attended
from dynchunk.ops._registration import Implementation, Schema, choose, imported, register
from dynchunk.ops.batched import attend as batched
from dynchunk.ops.layout import Reads
from dynchunk.ops.reference import attend as reference

SCHEMA = Schema(
    differentiable=OPERANDS,
    constant=(
        "Tensor cu_seqlens_q",
        "Tensor cu_seqlens_k",
        "Tensor cu_entries",
        "Tensor n_visible",
        "Tensor raw_start",
        "float scale",
    ),
    outputs=("out", "lse"),
)


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.attend import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register(
        "attend_reference", SCHEMA, reference.attend, reference.attend_backward, fake_attended
    ),
    "batched": register(
        "attend_batched", SCHEMA, batched.attend, batched.attend_backward, fake_attended
    ),
    "triton": _triton,
    "cpu": register(
        "attend_cpu",
        SCHEMA,
        imported("cpu.attend", "attend"),
        imported("cpu.attend", "attend_backward"),
        fake_attended,
    ),
}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor | Sequence[Tensor],
    entry_v: Tensor | Sequence[Tensor] | None,
    reads: Reads,
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Attended:
    """Attend to the visible entries and the recent raw tokens.

    Parameters
    ----------
    q : floating tensor [S, H, D]
        Packed queries: the last ones of each sequence.
    k : floating tensor [T, H_kv, D]
        Packed raw keys.
    v : floating tensor [T, H_kv, D_v], or None
        None: the keys are the values, ``entry_v`` is None too.
    entry_k : floating tensor [N, H_kv, D]; with views, one [N_g, H_kv / G, D] for each
        A row for every chunk, as :func:`~dynchunk.ops.pool.pool` returns them.
    entry_v : the same with D_v channels, or None
    reads : Reads
        What each query reads: ``Reads.of(chunks, window=..)``.
    bias : floating tensor [N] or [N, H_kv]; with views, one for each, optional
        Added to the entries' logits. The log of the chunk's length lets an entry weigh as much as
        its tokens.
    sink : floating tensor [H], optional
        A logit without a value.
    scale : float, optional
        Default: D^-1/2.
    impl : {None, "reference", "batched", "cpu", "triton"}
        "triton" is the default on a GPU, for head dims up to 512. It takes on trust that k and the
        entries have the rows laid out, and that neither ``n_visible`` nor ``raw_start`` decreases
        within a sequence, as ``Reads.of`` makes them. "batched" pads all sequences to one length,
        for CPU tensors: the fast one to train small models with. Quadratic memory, and batch mates
        may move the last bit.

    Returns
    -------
    Attended
        out [S, H, D_v] and lse [S, H]. Logits and sums are float32 at least.

    Examples
    --------
    >>> import torch
    >>> from dynchunk.chunks import Chunks
    >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> reads = Reads.of(Chunks.fixed(2, 3), window=1)
    >>> entry = torch.tensor([1.5, 0.0]).reshape(2, 1, 1)
    >>> attend(0 * x, x, None, entry, None, reads).out.flatten()
    tensor([1.0000, 1.7500, 2.2500])
    """
    operands = Operands.checked(q, k, v, entry_k, entry_v, bias, sink, reads)
    integers = (
        reads.cu_seqlens_q,
        reads.cu_seqlens_k,
        reads.cu_entries,
        reads.n_visible,
        reads.raw_start,
    )
    return Attended(*choose(impl, OPS, *operands)(*operands, *integers, default_scale(scale, q)))
