"""Tensors as compiled loops read them: flat arrays in their own dtype, and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynchunk._checks import require
from dynchunk.ops.cpu._numeric import LOG2_E

Array = NDArray[Any]

#: numpy has no bfloat16: its bits, and those of float16, come as integers that tell them apart.
_NUMPY = {torch.float32: "=f4", torch.bfloat16: "=u2", torch.float16: "=i2"}
_NOTHING = np.empty(0, np.float32)


def require_dtypes(*tensors: Tensor | None) -> None:
    """Raise unless all are of a dtype that :func:`~dynchunk.ops.cpu._numeric.widen` knows."""
    for x in tensors:
        expected = "'reference' for tensors of float64"
        require(x is None or x.dtype in _NUMPY, "impl", expected, "cpu")


def flat(x: Tensor | None) -> tuple[Array, tuple[int, ...]]:
    """Return a tensor's elements from its first to its last, and its steps but the last one's.

    Its last dimension has to be dense; where it is not, all is copied.
    """
    if x is None:
        return _NOTHING, (0, 0, 0)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    steps = x.stride()
    extent = 1 if x.numel() else 0
    if extent:
        for n, step in zip(x.shape, steps, strict=True):
            extent += (n - 1) * step
    return np.asarray(_Memory(x, extent)), steps[:-1]


def sinks_of(sink: Tensor | None, heads: int) -> Array:
    """Return sinks [H] as exponents of 2, in float32; -inf where there are none."""
    if sink is None:
        return np.full(heads, -np.inf, np.float32)
    return flat(sink.detach().float())[0] * LOG2_E


class _Memory:
    """A tensor's elements as numpy is told of them.

    ``Tensor.numpy`` would forbid the storage to change its size for good, which sharded parameters
    do all the time.
    """

    def __init__(self, x: Tensor, extent: int) -> None:
        self.owner = x  # numpy holds this object, and with it the memory
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), False),
            "shape": (extent,),
            "typestr": _NUMPY[x.dtype],
        }
