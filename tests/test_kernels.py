"""Triton kernels without a GPU: compiled for GPUs that are not here."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not made for this platform")


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_boundaries_compile_for_gpus(arch, dtype):
    from dynchunk_kernels.boundaries import maxima_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = ("*" + dtype, "*i64", "*i1", "i64", "i32", "constexpr")
    names = ("p_scores", "p_begin", "p_out", "T", "radius", "BLOCK")
    source = ASTSource(maxima_kernel, dict(zip(names, types, strict=True)), {"BLOCK": 1024})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert len(compiled.asm["cubin"]) > 0
    assert f"sm_{arch}" in compiled.asm["ptx"]


def test_triton_is_not_taken_on_the_cpu():
    from dynchunk import BoundaryRule

    with pytest.raises(ValueError, match="impl: expected 'cpu' or 'reference'"):
        BoundaryRule(1)(torch.zeros(4), impl="triton")
