"""Kernels compiled for GPUs that are not here, and what their machine code says."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """One configuration of a kernel, exactly as a launcher would compile it."""

    kernel: Any  #: the ``triton.jit`` function
    config: str  #: in words: head dim, dtype, tile sizes, options
    signature: dict[str, str]  #: argument: type, such as ``"*bf16"``, ``"i64"``, ``"constexpr"``
    constants: dict[str, Any]  #: values of the constexpr arguments
    num_warps: int
    num_stages: int
    archs: tuple[int, ...] = (80, 90, 100)  #: compute capabilities that use this configuration
    is_matmul: bool = True  #: must use tensor cores
