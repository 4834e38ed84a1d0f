"""Tensors as compiled loops read them: flat arrays in their own dtype, and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynchunk._checks import require

Array = NDArray[Any]

#: numpy has no bfloat16: its bits, and those of float16, come as integers that tell them apart.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOTHING = np.empty(0, np.float32)


def require_dtypes(*tensors: Tensor | None) -> None:
    """Raise unless all are of a dtype that :func:`~dynchunk.ops.cpu._numeric.widen` knows."""
    for x in tensors:
        expected = "'reference' for tensors of float64"
        require(x is None or x.dtype in _DTYPES, "impl", expected, "cpu")


def flat(x: Tensor | None) -> tuple[Array, tuple[int, ...]]:
    """Return a tensor's elements from its first to its last, and its steps but the last one's.

    Its last dimension has to be dense; where it is not, all is copied.
    """
    if x is None:
        return _NOTHING, (0, 0, 0)
    x = x.detach()
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    steps = x.stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True))
    row = x.as_strided((extent if x.numel() else 0,), (1,))
    return row.view(_BITS.get(x.dtype, x.dtype)).numpy(), steps[:-1]
