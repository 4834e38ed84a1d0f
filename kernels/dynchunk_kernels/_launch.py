"""What the launchers of attention kernels ask: of the device, of tensors, of head dims."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dynchunk_kernels.offline import ARCHS, Case

_KINDS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def arch_of(x: Tensor) -> int:
    """Return 10 * major + minor of the device's capability; the oldest one without a GPU."""
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return ARCHS[0]
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def programs_to_fill(x: Tensor) -> int:
    """Return how many programs keep the device busy; few in the interpreter, which is slow."""
    return 512 if x.device.type == "cuda" else 8


def head_block(D: int) -> int:
    """Return the channels that a tile has for a head dim: a power of two that tensor cores take."""
    return max(triton.next_power_of_2(D), 16)


def precision(dtype: torch.dtype) -> str:
    """Return how matrices of a dtype are multiplied: float32 is not to be cut to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def with_contiguous_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in a dtype, with neighbouring channels side by side."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def make_case(
    kernel: Any,
    config: str,
    constants: dict[str, Any],
    dtype: torch.dtype,
    kinds: dict[str, str],
    arch: int,
) -> Case:
    """Return a case of a kernel with constants as a launcher passes them.

    Pointers that ``kinds`` does not name are of ``dtype``; strides are multiples of 16 as they are
    for head dims that are.
    """
    constants = dict(constants)
    num_warps, num_stages = constants.pop("num_warps"), constants.pop("num_stages")

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.startswith("p_"):
            return kinds.get(name, _KINDS[dtype])
        return "fp32" if name == "scale" else "i32"

    return Case(
        kernel,
        config,
        {name: kind(name) for name in kernel.arg_names},
        constants,
        num_warps,
        num_stages,
        (arch,),
        is_matmul=dtype != torch.float32,
        divisible=tuple(
            name
            for name in kernel.arg_names
            if name.startswith("stride") and not name.startswith(("stride_bias", "stride_lse"))
        ),
    )
