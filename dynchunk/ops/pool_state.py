"""The softmax that pools a chunk, token by token: its state does not grow with the chunk.

As :mod:`dynchunk.ops.pool` without overlap, for tokens that come a few at a time. (The online
softmax: Milakov and Gimelshein 2018, arXiv 1805.02867.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from dynchunk._checks import require
from dynchunk.ops._registration import (
    Implementation,
    Schema,
    choose,
    register_forward,
    wide_dtype,
)
from dynchunk.ops._shapes import check, expand
from dynchunk.ops.pool import expand_bias
from dynchunk.ops.reference import pool as reference

SCHEMA = Schema(
    differentiable=(),
    constant=(
        "Tensor values",
        "Tensor? gate",
        "Tensor? slot_bias",
        "Tensor starts",
        "Tensor ends",
        "Tensor slots",
        "Tensor highest",
        "Tensor total",
        "Tensor weighted",
    ),
    outputs=("highest", "total", "weighted"),
)


class PoolState(NamedTuple):
    """What is known of N chunks, each [N, H, D], float32 at least."""

    highest: Tensor  #: highest logit, -inf before the first token
    total: Tensor  #: sum of exp(logit - highest)
    weighted: Tensor  #: sum of exp(logit - highest) times value

    @classmethod
    def empty(
        cls,
        chunks: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> PoolState:
        """Return the state of chunks without a token.

        >>> PoolState.empty(2, 1, 4).entries().shape
        torch.Size([2, 1, 4])
        """
        highest = torch.full((chunks, heads, width), -torch.inf, dtype=dtype, device=device)
        return cls(highest, torch.zeros_like(highest), torch.zeros_like(highest))

    def entries(self) -> Tensor:
        """Return the entries of the tokens so far [N, H, D]; zero where there are none."""
        return torch.where(self.total > 0, self.weighted / self.total, 0)


def fake_pool_state(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of the states."""
    return tuple(x.new_empty(x.shape) for x in inputs[-3:])


def _triton() -> CustomOpDef:
    from dynchunk.ops.triton.pool_state import OP

    return OP


OPS: dict[str, Implementation] = {
    "reference": register_forward(
        "pool_state_reference", SCHEMA, reference.pool_state, fake_pool_state
    ),
    "triton": _triton,
}


def pool_state(
    values: Tensor,
    state: PoolState,
    starts: Tensor,
    ends: Tensor,
    slots: Tensor,
    *,
    gate: Tensor | None = None,
    slot_bias: Tensor | None = None,
    impl: str | None = None,
) -> PoolState:
    """Add tokens to the chunks of a state; the result is new, and without a gradient.

    Nothing but shapes is verified, so that a step costs no synchronisation.

    Parameters
    ----------
    values : floating tensor [T, H, D]
        The new tokens of all chunks. For a series of an overlap: its channels.
    state : PoolState
        Of N chunks.
    starts, ends : int64 tensors [N]
        Chunk i gets the tokens ``starts[i] .. ends[i] - 1`` of ``values``.
    slots : int64 tensor [N]
        Offset of the first of them from the start of its chunk.
    gate, slot_bias
        As in :func:`~dynchunk.ops.pool.pool`.
    impl : {None, "reference", "triton"}

    Returns
    -------
    PoolState

    Examples
    --------
    >>> x = torch.tensor([1.0, 3.0, 8.0]).reshape(3, 1, 1)
    >>> at = torch.tensor([[0], [2], [3]])
    >>> state = pool_state(x, PoolState.empty(1, 1, 1), at[0], at[1], slots=at[0])
    >>> pool_state(x, state, at[1], at[2], slots=at[1]).entries().flatten()
    tensor([4.])
    """
    sizes: dict[str, int] = {}
    check("values", values, "T H D", sizes)
    for name, x in zip(PoolState._fields, state, strict=True):
        check(f"state.{name}", x, "N H D", sizes)
    for name, x in (("starts", starts), ("ends", ends), ("slots", slots)):
        check(name, x, "N", sizes, "integer")
    wide = wide_dtype(values, gate, slot_bias)
    ok = all(x.dtype == wide for x in state)
    require(ok, "state", f"tensors of {wide}", state.highest)
    if gate is not None:
        gate = expand("gate", gate, tuple(values.shape))
    if slot_bias is not None:
        slot_bias = expand_bias(slot_bias, tuple(values.shape))
    op = choose(impl, OPS, values, gate, slot_bias)
    return PoolState(*op(values, gate, slot_bias, starts, ends, slots, *state))
