"""Index scores: products of queries with keys that lie side by side, a number of each in a vector.

An index head has few channels, so that adding up a vector's lanes would cost more than the products
themselves. Keys are therefore transposed, a tile of them for many queries: then a lane is a key,
and ReLU, weight and the sum over heads stay in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dynchunk.ops.cpu import fast, jit
from dynchunk.ops.cpu._tiles import LANES, Array, fma, loop, splat, widen, zero

TILE = 64  #: keys
_VECTORS = TILE // LANES


def _add_scores(m):
    """Make a function that adds the scores of ``m`` heads, rows ``i ..``, to row ``t`` of out."""

    @intrinsic
    def add(typing_context, queries, weights, i, keys, t, out):
        def generate(context, b, signature, args):
            given = [Array(context, b, signature.args[k], args[k]) for k in (0, 1, 3, 5)]
            queries, weights, keys, out = given
            i64 = ir.IntType(64)
            rows = [b.add(args[2], i64(a)) for a in range(m)]
            first = [i64(k * LANES) for k in range(_VECTORS)]

            def step(d, sums):
                x = [keys.load(keys.at(d, k), None) for k in first]
                y = [splat(b, b.load(queries.at(row, d))) for row in rows]
                pairs = [(u, v) for u in y for v in x]
                return [fma(b, u, v, total) for (u, v), total in zip(pairs, sums, strict=True)]

            products = loop(b, queries.width, m * _VECTORS, step)
            for k, column in enumerate(first):
                total = out.load(out.at(args[4], column), None)
                for a, row in enumerate(rows):
                    x = products[a * _VECTORS + k]
                    relu = b.select(b.fcmp_ordered("<", x, zero), zero, x)  # NaN stays NaN
                    total = fma(b, splat(b, b.load(weights.at(row))), relu, total)
                out.store(total, out.at(args[4], column), None)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(queries, weights, integer, keys, integer, out), generate

    return add


_add_1, _add_4 = _add_scores(1), _add_scores(4)


@jit
def load_keys(k, at, n, out):
    """Copy ``n`` keys to the columns of ``out`` [D, TILE], zeros after them."""
    for j in range(n):
        for d in range(len(out)):
            out[d, j] = widen(k[at[j] + d])
    out[:, n:] = 0


@fast
def score_tile(queries, weights, heads, count, keys, factor, scores):
    """Write the scores of ``count`` queries and a tile of entries to ``scores`` [.., TILE].

    ``queries`` [count * heads, D] and ``weights`` [count * heads], the heads of a query in a row.
    """
    for t in range(count):
        scores[t] = 0
        for h in range(0, heads - 3, 4):
            _add_4(queries, weights, t * heads + h, keys, t, scores)
        for h in range(heads // 4 * 4, heads):
            _add_1(queries, weights, t * heads + h, keys, t, scores)
        for j in range(TILE):
            scores[t, j] *= factor
