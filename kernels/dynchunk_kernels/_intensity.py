"""Arithmetic intensity of a kernel, read from the tiles in its intermediate code."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_BITS = re.compile(r"(?:bf|fp?|i|ui|si)(\d+)")
_DOT = re.compile(r"= tt\.dot .* : tensor<(\w+)x\w+> \* tensor<(\w+)x\w+> ->")
_MEMORY = re.compile(r"\btt\.(?:load|store) .*tensor<([\dx]+)x!tt\.ptr<(\w+)>>")
_FLOATING = re.compile(
    r"= (?:arith\.(?:add|sub|mul|div|neg|rem|minimum|maximum|minnum|maxnum)f|math\.(?!cop|ab)\w+) "
    r".*tensor<([\dx]+)x(?:bf|f)\d+>"
)
_PLACE = re.compile(r" loc\([^{}]*\)$")  # in the source; a loop's name may stand there
_LOOP = re.compile(r"\bscf\.(?:for|while)\b")


class _Work(NamedTuple):
    """What a run of code does once."""

    flops: int = 0
    bytes: int = 0


def arithmetic_intensity(ttir: str) -> float:
    """Return floating-point operations per byte of global memory, in a kernel's main loop.

    That is the loop with most operations, or the whole kernel if it has none: one pass through it,
    with full tiles. A product of matrices [M, K] and [K, N] is 2 M N K operations, anything else
    one for each element of a tile. Caches may serve some of the bytes. (Roofline: Williams,
    Waterman, Patterson 2009, CACM 52(4).)

    Parameters
    ----------
    ttir : str
        Triton's IR, functions inlined: ``triton.compile(..).asm["ttir"]``.

    Returns
    -------
    float
        0 for a kernel that only moves data.
    """
    regions, loops = [(False, _Work())], []  # (is a loop, work) from the outermost on
    for line in ttir.splitlines():
        code = _PLACE.sub("", line)
        is_loop, done = regions[-1]
        regions[-1] = is_loop, _Work(done.flops + _flops(code), done.bytes + _bytes(code))
        opened = code.count("{") - code.count("}")
        for _ in range(-opened):
            is_loop, done = regions.pop()
            if is_loop:
                loops.append(done)
            else:  # what is run once, or by a branch, counts where it stands
                outer, before = regions[-1]
                regions[-1] = outer, _Work(before.flops + done.flops, before.bytes + done.bytes)
        regions += [(_LOOP.search(code) is not None, _Work())] * opened
    main = max([work for work in loops if work.bytes] or [regions[0][1]])
    return main.flops / main.bytes if main.bytes else 0.0


def _flops(code: str) -> int:
    if product := _DOT.search(code):
        (m, k), (_, n) = _shape(product[1]), _shape(product[2])
        return 2 * m * n * k
    elementwise = _FLOATING.search(code)
    return math.prod(_shape(elementwise[1])) if elementwise else 0


def _bytes(code: str) -> int:
    access = _MEMORY.search(code)
    if access is None:
        return 0
    bits = _BITS.fullmatch(access[2])
    return math.prod(_shape(access[1])) * max(int(bits[1]) if bits else 64, 8) // 8


def _shape(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split("x")))
