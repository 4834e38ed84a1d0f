"""numba implementations for CPU tensors. They do not hold the interpreter's lock while they run."""

from numba import njit

#: Compiled code is kept on disk: beside the source, or in NUMBA_CACHE_DIR.
jit = njit(cache=True, nogil=True)

__all__ = ["jit"]
