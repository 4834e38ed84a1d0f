"""Kernels that read by list, without a GPU: what they are compiled for, and to."""

import importlib
import inspect

import pytest

triton = pytest.importorskip("triton", reason="triton is not made for this platform")

MODULES = ("attend_selected", "attend_selected_chunks", "index_topk")


def cases():
    """One case of each kernel of each module, of half precision and for one architecture."""
    for name in MODULES:
        module = importlib.import_module(f"dynchunk_kernels.{name}")
        found = {}
        for case in module.cases():
            if case.archs == (90,) and case.config.startswith("bf16"):
                found.setdefault(case.kernel.__name__, case)
        for kernel, case in found.items():
            yield pytest.param(case, id=f"{name}-{kernel}")


def kernels():
    for name in ("_selected", *MODULES):
        module = importlib.import_module(f"dynchunk_kernels.{name}")
        for kernel, function in inspect.getmembers(module):
            if kernel.endswith("_kernel"):
                yield pytest.param(function, id=f"{name}-{kernel}")


@pytest.mark.parametrize("kernel", list(kernels()))
def test_case_37_lengths_are_compiled_for_no_value(kernel):
    """One compilation serves T = 63, 64 and 1000: sizes of inputs are never specialised."""
    sizes = [p for p in kernel.params if not p.is_constexpr and not p.name.startswith("p_")]
    assert {p.name for p in sizes if not p.do_not_specialize} <= {"scale"}
    constants = {p.name for p in kernel.params if p.is_constexpr}
    heads = {"H", "H_KV", "G", "L", "D", "D_V", "PAGE"}
    options = {"SHARED", "HAS_BIAS", "HAS_SINK", "ENTRIES", "RECENT", "LISTED"}
    assert {x for x in constants if not x.startswith("BLOCK_")} <= heads | options


@pytest.mark.parametrize("case", list(cases()))
def test_kernels_use_tensor_cores_and_spill_nothing(case):
    from dynchunk_kernels.offline import compile_case

    found = compile_case(case, 90)
    assert found.ok, found.why
