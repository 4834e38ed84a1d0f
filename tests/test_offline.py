"""Kernels compiled for GPUs that are not here: all fit, spill in no loop, use tensor cores.

By default two configurations of each kernel and architecture, the largest and the first; all of
them with HYPOTHESIS_PROFILE=nightly.
"""

import os

import pytest
import triton
import triton.language as tl
from dynchunk_kernels import offline
from dynchunk_kernels.offline import Case, compile_case, inspect, parse_sass, resident_warps

from dynchunk.bench.offline import compiled, jobs

IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
JOBS = jobs(offline.ARCHS, quick=not IS_NIGHTLY)


def name_of(job):
    return f"{job.case.kernel.__name__}-{job.case.config}-sm_{job.arch}"


@pytest.fixture(scope="module")
def found(request):
    """What all chosen configurations compile to, made side by side."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [call.params["job"] for call in calls if call and "job" in call.params]
    return dict(zip(chosen, compiled(chosen, os.cpu_count() or 1), strict=True))


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_every_kernel_is_fit_to_run(job, found):
    assert found[job].ok, f"{found[job].why}: {found[job]}"
    assert 0 < found[job].resident_warps <= 64
    if job.case.is_matmul and job.case.constants.get("D") == 512:  # DeepSeek V4's heads
        assert found[job].spill_bytes == 0


def test_every_module_with_kernels_shows_its_cases():
    assert {"boundaries", "pack", "pool"} <= set(offline.modules())
    for module in offline.modules():
        cases = offline.cases_of(module)
        assert len({(case.kernel.__name__, case.config, case.archs) for case in cases}) == len(
            cases
        )


@triton.jit
def multiply(p_a, p_b, p_c, K, N: tl.constexpr):
    n = tl.arange(0, N)
    k = tl.arange(0, 64)
    b_c = tl.zeros([N, N], tl.float32)
    for i in range(0, K, 64):
        b_a = tl.load(p_a + n[:, None] * K + (i + k)[None, :])
        b_b = tl.load(p_b + (i + k)[:, None] * N + n[None, :])
        b_c += tl.dot(b_a, b_b)
    tl.store(p_c + n[:, None] * N + n[None, :], b_c)


@triton.jit
def copy(p_x, p_y, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(p_y + n, tl.load(p_x + n))


def product(size, **changes):
    kinds = {"p_a": "*bf16", "p_b": "*bf16", "p_c": "*fp32", "K": "i32", "N": "constexpr"}
    return Case(multiply, f"N={size}", kinds, {"N": size}, 4, 3, divisible=("K",))._replace(
        **changes
    )


@pytest.mark.parametrize(("arch", "kind"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")])
def test_the_tensor_cores_of_each_architecture_are_recognised(arch, kind):
    found = compile_case(product(64), arch)
    assert found.ok
    assert list(found.mma) == [kind]
    assert found.wide_loads == found.global_loads > 0
    assert found.shared_bytes >= 2 * 64 * 64 * 2


def test_arithmetic_intensity_is_that_of_the_main_loop():
    found = compile_case(product(64), 90)  # 64 x 64 x 64 products of two tiles of 16-bit numbers
    assert found.intensity == 2 * 64**3 / (2 * 64 * 64 * 2)
    case = Case(copy, "", {"p_x": "*fp32", "p_y": "*fp32", "N": "constexpr"}, {"N": 512}, 4, 3)
    assert compile_case(case, 90).intensity == 0


@pytest.mark.parametrize(
    ("module", "kernel", "least", "most"),
    [("attend", "forward_kernel", 100, 300), ("pool", "pool_kernel", 0.4, 10), ("pack", "", 0, 0)],
)
def test_arithmetic_intensity_of_kernels(module, kernel, least, most):
    case = next(c for c in offline.cases_of(module) if kernel in c.kernel.__name__)
    assert least <= compile_case(case, 90).intensity <= most


def test_spills_are_seen_and_where_they_are():
    found = compile_case(product(128, num_warps=1), 90)
    assert not found.ok
    assert found.spill_bytes > 0
    assert 0 < found.spills_in_loop <= found.spill_stores + found.spill_loads
    assert f"spills {found.spill_bytes} bytes" in found.why


def test_too_much_shared_memory_is_seen():
    found = compile_case(product(128, num_stages=8), 80)
    assert "bytes of shared memory" in found.why
    assert found.resident_warps == 0


def test_a_product_without_tensor_cores_is_seen():
    case = Case(copy, "", {"p_x": "*fp32", "p_y": "*fp32", "N": "constexpr"}, {"N": 512}, 4, 3)
    assert compile_case(case, 90).why == "no tensor-core instruction"
    assert compile_case(case._replace(is_matmul=False), 90).ok


def test_what_does_not_compile_says_so():
    found = inspect(product(48), 90)  # no power of two
    assert not found.ok
    assert found.why.startswith("does not compile")


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="arch: expected one of 80, 90, 100, got 75"):
        compile_case(product(64), 75)


def test_a_loop_is_a_branch_back():
    code = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;        /* 0x00 */
        /*0010*/              @!P0 STL.64 [R1], R2 ;             /* 0x00 */
        /*0020*/                   LDL.128 R4, [R1] ;            /* 0x00 */
        /*0030*/                   HMMA.16816.F32 R4, R8, R2 ;   /* 0x00 */
        /*0040*/               @P1 BRA 0x20 ;                    /* 0x00 */
        /*0050*/                   EXIT ;                        /* 0x00 */
        /*0060*/                   BRA 0x60;                     /* 0x00 */
    """
    found = parse_sass(code)
    assert [x.name for x in found if x.is_in_loop] == ["LDL", "HMMA", "BRA"]
    assert found[1].opcode == "STL.64"


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "expected"),
    [
        (90, 4, 32, 0, 64),  # 64 warps are all that fit
        (90, 4, 255, 0, 8),  # 65,536 registers are two blocks of 4 x 32 x 256
        (90, 8, 128, 100 * 1024, 16),  # 228 KiB are two blocks of 101
        (80, 8, 128, 100 * 1024, 8),  # 164 KiB are one
        (100, 1, 16, 0, 32),  # 32 blocks
    ],
)
def test_resident_warps(arch, warps, registers, shared, expected):
    assert resident_warps(arch, warps, registers, shared) == expected


def test_tensor_memory_limits_blocks_too():
    assert resident_warps(100, 4, 32, 0, tensor_columns=256) == 8
