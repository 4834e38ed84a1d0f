"""Exponentials and maxima that numba's loops turn into vector instructions."""

from __future__ import annotations

import numpy as np
from numba import njit

from dynchunk.ops.cpu import fast

LOG2_E = np.float32(1.4426950408889634)

_LOWEST = np.float32(-126.0)  # below, 2^x is not normal: taken as zero
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
# 2^x on [-1/2, 1/2], interpolated at the Chebyshev nodes.
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (
    np.float32(c)
    for c in (
        0.6931471824645996,
        0.24022650718688965,
        0.05550410971045494,
        0.009618056938052177,
        0.0013333501992747188,
        0.00015461444854736328,
        0.00001529732435301412,
    )
)


@njit(cache=True, nogil=True, fastmath={"contract"})
def exp2(x):
    """2^x of a float32 number: -inf gives 0, NaN gives NaN. A loop over it is vectorised."""
    y = x if x > _LOWEST else _LOWEST
    whole = np.floor(y + _HALF)
    f = y - whole
    power = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    exponent = np.int32((np.int32(whole) + 127) << 23)  # numba shifts in 64 bits
    result = power * exponent.view(np.float32)
    return result if x >= _LOWEST else (np.float32(0) if x < _LOWEST else x)


@fast
def highest(x):
    """Return the maximum of float32 numbers, or NaN if there is one (of positive sign).

    Numbers are compared as integers of the same order, which vectors can do.
    """
    best = np.int32(-0x80000000)
    for bits in x.view(np.int32):
        best = max(best, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    return np.int32(best ^ ((best >> 31) & 0x7FFFFFFF)).view(np.float32)
