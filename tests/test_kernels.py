"""Triton kernels without a GPU: in the interpreter, and compiled for GPUs that are not here."""

import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not made for this platform")

INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from dynchunk import BoundaryRule

torch.manual_seed(0)
for rule in (
    BoundaryRule(0, threshold=0.5),
    BoundaryRule(1, threshold=0.7, max_length=9),
    BoundaryRule(5, min_length=3, max_length=7),
    BoundaryRule(5, min_length=3, max_length=7, ladder=True),
):
    for x in (torch.rand(3000), torch.randint(0, 3, (3000,)).double(), torch.zeros(0)):
        for cu in ([0, len(x)], [0, 0, len(x) // 3, len(x) // 3 + len(x) % 7, len(x)]):
            assert rule(x, cu, impl="triton").equal(rule(x, cu, impl="cpu"))
print("equal")
"""


def test_boundaries_in_the_interpreter():
    command = [sys.executable, "-c", INTERPRETED]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.stdout == "equal\n", out.stderr


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
