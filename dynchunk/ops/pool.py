"""Chunks to entries: a softmax over the tokens of each chunk, for each channel.

Entry i, per channel:

    E_i = sum_j a_j C_j,    a = softmax_j(Z_j + P_slot(j))

over the tokens j of chunk i, with values C, gate Z, slot bias P and ``slot(j)`` the token's offset
from the start of its chunk (the last row of P serves all slots past it). Without Z and P this is
the mean. With *overlap*, C, Z and P have 2D channels: entry i pools series a (the first D) of chunk
i - 1 and series b (the last D) of chunk i in one softmax, the first chunk of a sequence only b.
(DeepSeek V4: HCA is the plain form, CSA the one with overlap.)

What follows an entry in a model may be part of the operation: RMSNorm, then RoPE.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require
from dynchunk.ops._registration import Implementation, Schema, choose, imported, register
from dynchunk.ops._shapes import check, expand
from dynchunk.ops.layout import Spans
from dynchunk.ops.reference import pool as reference

SCHEMA = Schema(
    differentiable=("Tensor values", "Tensor? gate", "Tensor? slot_bias", "Tensor? norm"),
    constant=(
        "Tensor? before",
        "Tensor starts",
        "Tensor ends",
        "Tensor? rows",
        "Tensor? cos",
        "Tensor? sin",
        "float eps",
    ),
    outputs=("entries",),
)


def fake_pool(
    values: Tensor,
    gate: Tensor | None,
    slot_bias: Tensor | None,
    norm: Tensor | None,
    before: Tensor | None,
    starts: Tensor,
    *others: object,
) -> Tensor:
    """Return a tensor of the shape and dtype of the entries."""
    width = values.shape[2] if before is None else values.shape[2] // 2
    return values.new_empty(starts.shape[0], values.shape[1], width)


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.pool import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register(
        "pool_reference", SCHEMA, reference.pool, reference.pool_backward, fake_pool
    ),
    "triton": _triton,
    "cpu": register(
        "pool_cpu",
        SCHEMA,
        imported("cpu.pool", "pool"),
        imported("cpu.pool", "pool_backward"),
        fake_pool,
    ),
}


def pool(
    values: Tensor,
    spans: Spans,
    *,
    gate: Tensor | None = None,
    slot_bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    rope: tuple[Tensor, Tensor] | None = None,
    rows: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Pool the tokens of each chunk into an entry.

    Parameters
    ----------
    values : floating tensor [T, .., D], or [T, .., 2D] with overlap
        Packed tokens.
    spans : Spans
        Which tokens each entry pools, and whether chunks overlap: ``Spans.of(chunks)``.
    gate : floating tensor that broadcasts to the shape of ``values``, optional
        Logits of the softmax. Default: zero.
    slot_bias : floating tensor [S, D'] or [S, .., D'], optional
        D' as in ``values``. Added to the logits.
    norm : floating tensor [D], optional
        Weights of an RMSNorm of each entry (over its D channels), with ``eps`` under the root.
    rope : (cos, sin) tensors [N, P], optional
        Then rotate the last P pairs of neighbouring channels by these angles, which get no
        gradient.
    rows : integer tensor [T], optional
        The row of ``values`` and ``gate`` that holds each token, a row of its own, such as
        :attr:`TilePlan.row_of_token <dynchunk.packing.TilePlan>`. No other row is read.
        Default: token t is row t.
    impl : {None, "reference", "cpu", "triton"}

    Returns
    -------
    tensor [N, .., D]
        In the dtype of ``values``; all is computed in float32 at least. A row for every chunk: that
        of an open chunk is zero and passes no gradient on (no query sees it).

    Examples
    --------
    >>> import torch
    >>> from dynchunk.chunks import Chunks
    >>> x = torch.tensor([[1.0], [3.0], [5.0], [7.0], [9.0]])
    >>> pool(x, Spans.of(Chunks.fixed(2, 5))).flatten()
    tensor([2., 6., 0.])
    """
    ok = values.is_floating_point() and values.ndim >= 2
    require(ok, "values", "a floating tensor [T, .., D]", values)
    series = 1 if spans.before is None else 2
    require(values.shape[-1] % series == 0, "values", "2D channels with overlap", values)
    width = values.shape[-1] // series
    if gate is not None:
        gate = as_heads(expand("gate", gate, tuple(values.shape)))
    if slot_bias is not None:
        slot_bias = as_heads(expand_bias(slot_bias, tuple(values.shape)))
    if norm is not None:
        check("norm", norm, "D", {"D": width})
    if rows is not None:
        check("rows", rows, "T", {}, "integer")
    cos, sin = (None, None) if rope is None else _angles(rope, len(spans.starts), width)
    entries: Tensor = choose(impl, OPS, values, gate, slot_bias, norm)(
        as_heads(values), gate, slot_bias, norm, *spans, rows, cos, sin, eps
    )
    return entries.reshape(len(entries), *values.shape[1:-1], width)


def _angles(rope: tuple[Tensor, Tensor], n: int, width: int) -> tuple[Tensor, Tensor]:
    cos, sin = rope
    sizes = {"N": n}
    check("rope (cosines)", cos, "N P", sizes)
    check("rope (sines)", sin, "N P", sizes)
    ok = width % 2 == 0 and 2 * sizes["P"] <= width
    require(ok, "rope", f"at most {width // 2} pairs of an even number of channels", cos)
    return cos, sin


def expand_bias(slot_bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a slot bias [S, C] or [S, .., C] in the shape of values [.., C], S rows."""
    ok = slot_bias.ndim in (2, len(shape)) and len(slot_bias) > 0
    require(ok, "slot_bias", f"[S, {shape[-1]}] or [S, .., {shape[-1]}], S >= 1", slot_bias)
    if slot_bias.ndim == 2:
        slot_bias = slot_bias.reshape(len(slot_bias), *[1] * (len(shape) - 2), -1)
    return expand("slot_bias", slot_bias, (len(slot_bias), *shape[1:]))


def as_heads(x: Tensor) -> Tensor:
    """View [T, .., D] as [T, H, D]."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
