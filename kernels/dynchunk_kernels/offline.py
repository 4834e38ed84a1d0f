"""Kernels compiled for GPUs that are not here, and what their machine code says."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import dynchunk_kernels
from dynchunk_kernels._intensity import arithmetic_intensity

ARCHS = (80, 90, 100)

_KIB = 1024
_POINTER_BYTES = 16  # what torch's allocator guarantees at least


class Case(NamedTuple):
    """One configuration of a kernel, exactly as a launcher would compile it."""

    kernel: Any  #: the ``triton.jit`` function
    config: str  #: in words: head dim, dtype, tile sizes, options
    signature: dict[str, str]  #: argument: type, such as ``"*bf16"``, ``"i64"``, ``"constexpr"``
    constants: dict[str, Any]  #: values of the constexpr arguments
    num_warps: int
    num_stages: int
    archs: tuple[int, ...] = ARCHS  #: compute capabilities that use this configuration
    is_matmul: bool = True  #: must use tensor cores
    divisible: tuple[str, ...] = ()  #: integers that Triton specialises as multiples of 16


class Limits(NamedTuple):
    """What one multiprocessor of an architecture holds."""

    shared_per_block: int  #: bytes
    shared_per_sm: int  #: bytes
    registers: int = 65_536
    warps: int = 64
    blocks: int = 32
    tensor_columns: int = 512  #: tensor memory, where there is some


#: By compute capability (CUDA C++ programming guide, "Technical Specifications").
LIMITS = {
    80: Limits(163 * _KIB, 164 * _KIB),
    90: Limits(227 * _KIB, 228 * _KIB),
    100: Limits(227 * _KIB, 228 * _KIB),
}


class Compiled(NamedTuple):
    """What the machine code of a case says."""

    kernel: str
    config: str
    arch: int
    registers: int  #: per thread
    spill_bytes: int  #: local memory per thread, the size of its stack frame
    spill_stores: int  #: STL instructions
    spill_loads: int  #: LDL instructions
    spills_in_loop: int  #: how many of both lie inside a loop
    shared_bytes: int  #: per block
    shared_limit: int  #: per block of the architecture
    num_warps: int  #: per block
    resident_warps: int  #: per multiprocessor, of at most 64
    mma: dict[str, int]  #: tensor-core instructions by kind, such as ``{"HGMMA": 24}``
    wide_loads: int  #: instructions that read 16 bytes a thread, or a tile, from global memory
    global_loads: int  #: all instructions that read global memory
    intensity: float  #: operations per byte of global memory in the main loop
    why: str  #: what is wrong with it; empty if nothing is

    @property
    def ok(self) -> bool:
        """Whether it fits, spills in no loop and uses tensor cores where it multiplies matrices."""
        return not self.why

    @property
    def occupancy(self) -> float:
        """Resident warps over the most that the multiprocessor holds."""
        return self.resident_warps / LIMITS[self.arch].warps


def compile_case(case: Case, arch: int) -> Compiled:
    """Compile a case for an architecture and read its machine code.

    Parameters
    ----------
    case : Case
    arch : {80, 90, 100}
        Compute capability, 10 * major + minor.

    Raises
    ------
    ValueError
        For another architecture.
    RuntimeError
        Without ``cuobjdump``, which the wheels of Triton bring.
    triton.CompilationError and others
        What Triton says of a kernel that does not compile.
    """
    if arch not in LIMITS:
        raise ValueError(f"arch: expected one of {', '.join(map(str, LIMITS))}, got {arch}")
    names = list(case.signature)
    aligned = [name for name, kind in case.signature.items() if kind.startswith("*")]
    source = ASTSource(
        case.kernel,
        case.signature,
        case.constants,
        {
            (names.index(name),): [["tt.divisibility", _POINTER_BYTES]]
            for name in (*aligned, *case.divisible)
        },
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _read(case, arch, binary)


def inspect(case: Case, arch: int) -> Compiled:
    """Return what :func:`compile_case` finds; what does not compile says so in ``why``."""
    try:
        return compile_case(case, arch)
    except (triton.TritonError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        nothing = dict.fromkeys(Compiled._fields, 0)
        known = {
            "kernel": case.kernel.__name__,
            "config": case.config,
            "arch": arch,
            "shared_limit": LIMITS[arch].shared_per_block,
            "num_warps": case.num_warps,
            "mma": {},
            "why": f"does not compile: {reason[-1]}",
        }
        return Compiled(**(nothing | known))


def modules() -> list[str]:
    """Return the names of this package's modules that have kernels: those with ``cases``."""
    names = [found.name for found in pkgutil.iter_modules(dynchunk_kernels.__path__)]
    return [name for name in names if hasattr(_load(name), "cases")]


@cache
def cases_of(module: str) -> list[Case]:
    """Return all configurations of the kernels of a module."""
    return list(_load(module).cases())


def size_of(case: Case) -> tuple[int, int]:
    """Return the product of a kernel's tile sizes, and that of all sizes it is compiled for."""
    sizes = {name: x for name, x in case.constants.items() if type(x) is int and x > 0}
    tiles = math.prod(x for name, x in sizes.items() if name.startswith("BLOCK"))
    return tiles, math.prod(sizes.values())


def _load(module: str) -> ModuleType:
    return importlib.import_module(f"dynchunk_kernels.{module}")


def _read(case: Case, arch: int, binary: Any) -> Compiled:
    code = _dump(binary.asm["cubin"])
    registers, stack, static = (
        int(match[1]) if (match := re.search(rf"\b{word}:(\d+)", code)) else 0
        for word in ("REG", "STACK", "SHARED")
    )
    shared = max(binary.metadata.shared, static)
    tensor_columns = getattr(binary.metadata, "tmem_size", 0)
    instructions = parse_sass(code)
    spills = [x for x in instructions if x.name in ("STL", "LDL")]
    loads = [x for x in instructions if x.name in _GLOBAL_LOADS]
    found = Compiled(
        kernel=case.kernel.__name__,
        config=case.config,
        arch=arch,
        registers=registers,
        spill_bytes=stack,
        spill_stores=sum(x.name == "STL" for x in spills),
        spill_loads=sum(x.name == "LDL" for x in spills),
        spills_in_loop=sum(x.is_in_loop for x in spills),
        shared_bytes=shared,
        shared_limit=LIMITS[arch].shared_per_block,
        num_warps=case.num_warps,
        resident_warps=resident_warps(arch, case.num_warps, registers, shared, tensor_columns),
        mma=dict(Counter(x.name for x in instructions if x.name.endswith("MMA"))),
        wide_loads=sum(".128" in x.opcode or x.name in _TILE_LOADS for x in loads),
        global_loads=len(loads),
        intensity=arithmetic_intensity(binary.asm["ttir"]),
        why="",
    )
    return found._replace(why=", ".join(_faults(found, case.is_matmul)))


def _faults(found: Compiled, is_matmul: bool) -> Iterable[str]:
    if found.spills_in_loop:  # a few that run once cost nothing
        where = f"{found.spills_in_loop} of them in a loop"
        yield (
            f"spills {found.spill_bytes} bytes "
            f"({found.spill_stores} STL, {found.spill_loads} LDL, {where})"
        )
    if found.shared_bytes > found.shared_limit:
        yield f"needs {found.shared_bytes} of {found.shared_limit} bytes of shared memory"
    if is_matmul and not found.mma:
        yield "no tensor-core instruction"


def resident_warps(
    arch: int, num_warps: int, registers: int, shared: int, tensor_columns: int = 0
) -> int:
    """Return how many warps of blocks of ``num_warps`` one multiprocessor holds at a time.

    ``registers`` are those of a thread, ``shared`` the bytes of a block, ``tensor_columns`` its
    columns of tensor memory.
    """
    limits = LIMITS[arch]
    of_warp = -(-registers * 32 // 256) * 256  # registers are handed out in units of 256
    blocks = min(limits.blocks, limits.warps // num_warps)
    blocks = min(blocks, limits.registers // max(of_warp * num_warps, 1))
    blocks = min(blocks, limits.shared_per_sm // (shared + _KIB))  # 1 KiB a block is reserved
    if tensor_columns:
        blocks = min(blocks, limits.tensor_columns // tensor_columns)
    return blocks * num_warps


class Instruction(NamedTuple):
    """One instruction of a kernel."""

    address: int
    opcode: str  #: with modifiers, such as ``"LDG.E.128"``
    is_in_loop: bool = False

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


_GLOBAL_LOADS = ("LD", "LDG", "LDGSTS", "UBLKCP", "UTMALDG")
_TILE_LOADS = ("UBLKCP", "UTMALDG")  # bulk copies by the memory engine
_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\b(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


def parse_sass(code: str) -> list[Instruction]:
    """Return the instructions of a kernel from what ``cuobjdump -sass`` prints.

    Those between a branch back and its target are in a loop.
    """
    found, loops = [], []
    for line in _LINE.finditer(code):
        address, opcode = int(line[1], 16), line[2]
        found.append(Instruction(address, opcode))
        target = _TARGET.search(line[3])
        if opcode.startswith("BRA") and target and int(target[1], 16) < address:
            loops.append((int(target[1], 16), address))
    return [
        x._replace(is_in_loop=any(first <= x.address <= last for first, last in loops))
        for x in found
    ]


def _dump(cubin: bytes) -> str:
    """Return what cuobjdump says of a binary: its resources, then its code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [_find_cuobjdump(), "-res-usage", "-sass", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"cuobjdump failed: {found.stderr.strip()}")
    return found.stdout


@cache
def _find_cuobjdump() -> str:
    try:
        return str(triton.knobs.nvidia.cuobjdump.path)
    except RuntimeError as error:
        raise RuntimeError(
            "cuobjdump is needed to read machine code and is not beside triton: install triton "
            "from its wheel, or name the program in TRITON_CUOBJDUMP_PATH"
        ) from error
