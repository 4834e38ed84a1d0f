"""Products of a few rows with many, in tiles whose sums stay in registers.

numba's loops over rows leave sums in memory or pay for each call what a row of 128 numbers costs;
so the two innermost loops are written in LLVM's own terms: vectors of 16 numbers, which it splits
where the processor's are shorter. Rows of storage are named by their offsets in a flat array, in
its own dtype, and widened to float32 in registers. Every sum has one order, whatever the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dynchunk.ops.cpu import jit

ROWS = 8  #: lists of rows are padded to a multiple of it
LANES = 16

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTEGERS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
zero = ir.Constant(_VECTOR, None)


def widened(b: ir.IRBuilder, x: ir.Value, dtype: types.Type) -> ir.Value:
    """Return stored numbers as float32: the bits of bfloat16 are uint16, of float16 int16."""
    n = x.type.count
    if dtype == types.uint16:
        high = b.shl(b.zext(x, ir.VectorType(_I32, n)), _integers([16] * n))
        return b.bitcast(high, ir.VectorType(_F32, n))
    if dtype == types.int16:
        return b.fpext(b.bitcast(x, ir.VectorType(ir.HalfType(), n)), ir.VectorType(_F32, n))
    return x


def _integers(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


def _i64(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _call(b: ir.IRBuilder, name: str, returns: ir.Type, *args: ir.Value) -> ir.Value:
    signature = ir.FunctionType(returns, [x.type for x in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)


def splat(b: ir.IRBuilder, x: ir.Value, vector: ir.VectorType = _VECTOR) -> ir.Value:
    one = b.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, _integers([0] * LANES))


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return _call(b, "llvm.fma.v16f32", _VECTOR, x, y, z)


class Array:
    """A C-contiguous argument of one to three dimensions."""

    def __init__(self, context, b, kind, value):
        struct = context.make_array(kind)(context, b, value)
        self.b, self.data, self.dtype = b, struct.data, kind.dtype
        self.shape = cgutils.unpack_tuple(b, struct.shape)
        self.width = self.shape[-1]

    def at(self, *index):
        """Return a pointer to an element."""
        where = index[0]
        for i, size in zip(index[1:], self.shape[1:], strict=True):
            where = self.b.add(self.b.mul(where, size), i)
        return self.b.gep(self.data, [where])

    def load(self, pointer, mask):
        """Load a vector of float32, zero where a mask does not hold."""
        b, size = self.b, self.dtype.bitwidth // 8
        vector = ir.VectorType(pointer.type.pointee, LANES)
        pointer = b.bitcast(pointer, vector.as_pointer())
        if mask is None:
            x = b.load(pointer)
            x.align = size
        else:
            name = f"llvm.masked.load.v16{'f32' if size == 4 else 'i16'}.p0"
            given = pointer, ir.Constant(_I32, size), mask, ir.Constant(vector, None)
            x = _call(b, name, vector, *given)
        return widened(b, x, self.dtype)

    def store(self, x, pointer, mask):
        """Store a vector of float32, or where a mask holds."""
        pointer = self.b.bitcast(pointer, x.type.as_pointer())
        if mask is None:
            self.b.store(x, pointer).align = 4
        else:
            given = x, pointer, ir.Constant(_I32, 4), mask
            _call(self.b, "llvm.masked.store.v16f32.p0", ir.VoidType(), *given)


def _each_vector(
    b: ir.IRBuilder,
    width: ir.Value,
    sums: int,
    step: Callable[[ir.Value, list[ir.Value], ir.Value | None], list[ir.Value]],
) -> list[ir.Value]:
    """Loop over vectors of a row, the last one under a mask; return sums that start at zero."""
    whole = b.and_(width, _i64(-LANES))
    before = b.block
    loop, tail, rest, after = (b.append_basic_block(x) for x in ("loop", "tail", "rest", "after"))
    b.cbranch(b.icmp_signed(">", whole, _i64(0)), loop, tail)
    b.position_at_end(loop)
    at, running = b.phi(_I64), [b.phi(_VECTOR) for _ in range(sums)]
    new = step(at, running, None)
    following = b.add(at, _i64(LANES))
    b.cbranch(b.icmp_signed("<", following, whole), loop, tail)
    _incoming(at, before, _i64(0), loop, following)
    b.position_at_end(tail)
    found = [b.phi(_VECTOR) for _ in range(sums)]
    for x, total, value in zip(running, found, new, strict=True):
        _incoming(x, before, zero, loop, value)
        _incoming(total, before, zero, loop, value)
    b.cbranch(b.icmp_signed("<", whole, width), rest, after)
    b.position_at_end(rest)
    left = splat(b, b.trunc(b.sub(width, whole), _I32), _INTEGERS)
    last = step(whole, found, b.icmp_signed("<", _integers(range(LANES)), left))
    b.branch(after)
    b.position_at_end(after)
    results = [b.phi(_VECTOR) for _ in range(sums)]
    for x, total, value in zip(results, found, last, strict=True):
        _incoming(x, tail, total, rest, value)
    return results


def loop(
    b: ir.IRBuilder,
    count: ir.Value,
    sums: int,
    step: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Call ``step`` for numbers below ``count``, one at least; return sums that start at zero."""
    before, body, after = (
        b.block,
        b.append_basic_block("numbers"),
        b.append_basic_block("after_numbers"),
    )
    b.branch(body)
    b.position_at_end(body)
    at, running = b.phi(_I64), [b.phi(_VECTOR) for _ in range(sums)]
    new = step(at, running)
    following, last = b.add(at, _i64(1)), b.block
    b.cbranch(b.icmp_signed("<", following, count), body, after)
    _incoming(at, before, _i64(0), last, following)
    for total, value in zip(running, new, strict=True):
        _incoming(total, before, zero, last, value)
    b.position_at_end(after)
    return new


def _incoming(phi, *pairs):
    for block, value in zip(pairs[::2], pairs[1::2], strict=True):
        phi.add_incoming(value, block)


def _across(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Sum each vector's lanes: a power of two of vectors become the lanes of one.

    Halves of the lanes are added, of two vectors at a time, until a lane is left of each.
    """
    group = LANES
    while group > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else None
        total = vectors[0].type.count * (2 if pairs else 1)
        firsts = range(0, total, group)
        low = _integers([first + i for first in firsts for i in range(group // 2)])
        high = _integers([first + i for first in firsts for i in range(group // 2, group)])
        vectors = [
            b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high))
            for x, y in pairs or [(vectors[0], vectors[0])]
        ]
        group //= 2
    return vectors[0]


def _tile(emit, m, n, ahead=False):
    """Make a function of arrays from one that emits the code for a tile of m times n rows.

    It goes through heads ``heads[0] .. heads[1] - 1``, as they lie side by side in memory. With
    ``ahead`` it also brings rows of another list into the second-level cache, one for each of the
    n: the processor's own prefetching stops with each run of rows that lie side by side.
    """

    def generate(context, b, signature, args):
        given = [Array(context, b, signature.args[k], args[k]) for k in (0, 2, 3, 7, *after)]
        few, flat, offsets, out, *others = given
        rows = [b.add(args[1], _i64(a)) for a in range(m)]
        columns = [b.add(args[4], _i64(a)) for a in range(n)]
        many = _pointers(b, flat, offsets, columns)
        soon = _pointers(b, *others, columns) if ahead else []
        first, last = cgutils.unpack_tuple(b, args[6])

        def of_head(at, sums):
            head = b.add(first, at)
            here = _shifted(b, many, b.mul(head, args[5]))
            there = _shifted(b, soon, b.mul(head, args[10])) if ahead else []
            emit(b, few, head, rows, columns, flat, here, out, there)
            return sums

        loop(b, b.sub(last, first), 0, of_head)
        return context.get_dummy_value()

    after = (8, 9) if ahead else ()
    integer, pair = types.int64, types.UniTuple(types.int64, 2)

    @intrinsic
    def tile(typing_context, few, i, flat, offsets, j, step, heads, out):
        return types.void(few, integer, flat, offsets, integer, integer, pair, out), generate

    @intrinsic
    def tile_ahead(typing_context, few, i, flat, offsets, j, step, heads, out, other, at, far):
        given = few, integer, flat, offsets, integer, integer, pair, out, other, at, integer
        return types.void(*given), generate

    return tile_ahead if ahead else tile


def _pointers(b, flat, offsets, columns):
    return [flat.at(b.load(offsets.at(x))) for x in columns]


def _shifted(b, pointers, shift):
    return [b.gep(pointer, [shift]) for pointer in pointers]


def _prefetch(b, pointers, at):
    for pointer in _shifted(b, pointers, at):
        pointer = b.bitcast(pointer, ir.IntType(8).as_pointer())
        read, second_level, data = (ir.Constant(_I32, x) for x in (0, 2, 1))
        _call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, read, second_level, data)


def _emit_dots(b, few, head, rows, columns, flat, many, out, soon):
    mine = [few.at(head, row, _i64(0)) for row in rows]

    def step(at, sums, mask):
        _prefetch(b, soon, at)
        x = [flat.load(pointer, mask) for pointer in _shifted(b, many, at)]
        y = [few.load(pointer, mask) for pointer in _shifted(b, mine, at)]
        pairs = [(u, v) for u in y for v in x]
        return [fma(b, u, v, total) for (u, v), total in zip(pairs, sums, strict=True)]

    found = _across(b, _each_vector(b, few.width, len(mine) * len(many), step))
    for a, row in enumerate(rows):
        n = len(many)
        own = b.shuffle_vector(found, found, _integers(range(a * n, a * n + n)))
        out.store(own, out.at(head, row, columns[0]), None)


def _emit_add(b, few, head, rows, columns, flat, many, out, soon):
    weights = [[splat(b, b.load(few.at(head, row, x))) for x in columns] for row in rows]
    mine = [out.at(head, row, _i64(0)) for row in rows]

    def step(at, sums, mask):
        _prefetch(b, soon, at)
        x = [flat.load(pointer, mask) for pointer in _shifted(b, many, at)]
        for pointer, own in zip(_shifted(b, mine, at), weights, strict=True):
            total = out.load(pointer, mask)
            for weight, value in zip(own, x, strict=True):
                total = fma(b, weight, value, total)
            out.store(total, pointer, mask)
        return sums

    _each_vector(b, out.width, 0, step)


_dots_4x4, _add_4x4 = _tile(_emit_dots, 4, 4), _tile(_emit_add, 4, 4)
_dots_2x4_ahead, _dots_4x4_ahead = (_tile(_emit_dots, m, 4, ahead=True) for m in (2, 4))
_add_2x4_ahead, _add_4x4_ahead = (_tile(_emit_add, m, 4, ahead=True) for m in (2, 4))


@jit
def dots(few, flat, offsets, step, n, heads, out):
    """Write dot products of rows ``few`` [heads, M, D] with ``n`` rows of each head of a list.

    Row j of head h starts at ``flat[offsets[j] + h * step]``; rows are taken in fours, up to a
    multiple of ROWS, for heads ``heads[0] .. heads[1] - 1``. The products go to ``out``
    [heads, M, n or more]. M is a multiple of 4, all arrays are C-contiguous.
    """
    for j in range(0, n, ROWS):
        for i in range(0, few.shape[1], 4):
            for k in (j, j + 4):
                _dots_4x4(few, i, flat, offsets, k, step, heads, out)


@jit
def dots_ahead(few, flat, offsets, step, n, heads, out, other, at, far):
    """Write what :func:`dots` does, M even, and prefetch another list of as many rows.

    Its row j of head h starts at ``other[at[j] + h * far]``.
    """
    M = few.shape[1]
    for j in range(0, n, 4):
        for i in range(0, M - 2, 4):
            _dots_4x4_ahead(few, i, flat, offsets, j, step, heads, out, other, at, far)
        if M % 4:
            _dots_2x4_ahead(few, M - 2, flat, offsets, j, step, heads, out, other, at, far)


@jit
def add_weighted(weights, flat, offsets, step, n, heads, out):
    """Add ``weights`` [heads, M, n or more] times rows of a list to ``out`` [heads, M, D].

    All else as for :func:`dots`.
    """
    for j in range(0, n, ROWS):
        for i in range(0, out.shape[1], 4):
            for k in (j, j + 4):
                _add_4x4(weights, i, flat, offsets, k, step, heads, out)


@jit
def add_weighted_ahead(weights, flat, offsets, step, n, heads, out, other, at, far):
    """Add what :func:`add_weighted` does, and prefetch like :func:`dots_ahead`."""
    M = out.shape[1]
    for j in range(0, n, 4):
        for i in range(0, M - 2, 4):
            _add_4x4_ahead(weights, i, flat, offsets, j, step, heads, out, other, at, far)
        if M % 4:
            _add_2x4_ahead(weights, M - 2, flat, offsets, j, step, heads, out, other, at, far)


@intrinsic
def widen(typing_context, x):
    """Return one stored number as float32."""

    def generate(context, b, signature, args):
        one = b.insert_element(
            ir.Constant(ir.VectorType(args[0].type, 1), ir.Undefined), args[0], ir.Constant(_I32, 0)
        )
        return b.extract_element(widened(b, one, signature.args[0]), ir.Constant(_I32, 0))

    return types.float32(x), generate
