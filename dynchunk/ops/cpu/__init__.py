"""numba implementations for CPU tensors. They do not hold the interpreter's lock while they run.

Compiled code is kept on disk, beside the source or in NUMBA_CACHE_DIR. numba looks for changes in
a function's own file only: after an edit to a file that others import, clear that cache.
"""

from numba import njit

jit = njit(cache=True, nogil=True)

_FLAGS = {"contract", "nsz", "reassoc"}

#: For arithmetic whose order may change to make use of vectors; NaN and infinity keep their sense.
fast = njit(cache=True, nogil=True, fastmath=_FLAGS)

#: The same, as part of its caller: arrays cost a call as much as some tens of numbers.
inline = njit(cache=True, nogil=True, fastmath=_FLAGS, inline="always")

__all__ = ["fast", "inline", "jit"]
