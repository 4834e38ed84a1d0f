"""Threads for compiled loops: those that torch's own operations run on.

torch's OpenMP threads wait actively for some milliseconds after each operation. Threads beside them
share their cores, as would a second OpenMP or numba's layers (one of which also aborts when two
threads of a program use it at once). So loops are given to torch's team, by the entry that
compilers call (``GOMP_parallel``); a torch without it, and a forked child, whose parent's team does
not survive, use threads of Python's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_TASKS_PER_THREAD = 16  # ranges a thread takes of a run: the last to finish is not far behind
_Outlined = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # what a team calls, once on each thread


def run(kernel: Callable[..., None], n_tasks: int, *args: Any) -> None:
    """Call ``kernel(first, last, *args)`` on ranges that make up ``range(n_tasks)``.

    On ``torch.get_num_threads()`` threads, this one included. Which thread takes which range is
    left to chance: a task's result may depend on nothing but the task. If ranges raise, so does
    this, with the error of one of them, when all threads are done.
    """
    threads = torch.get_num_threads()
    if min(threads, n_tasks) <= 1:
        kernel(0, n_tasks, *args)
        return
    size = -(-n_tasks // (threads * _TASKS_PER_THREAD))
    ranges = iter(range(0, n_tasks, size))  # all threads draw from it
    errors: list[BaseException] = []

    def work(_: object = None) -> None:
        try:
            for first in ranges:
                kernel(first, min(first + size, n_tasks), *args)
        except BaseException as error:  # no caller in C could pass it on
            errors.append(error)

    parallel = team()
    if parallel is not None:
        # Fewer threads than torch's number would end the others, to be started again.
        parallel(_Outlined(work), None, threads, 0)
    else:
        _on_python_threads(work, min(threads, n_tasks))
    if errors:
        raise errors[0]


@lru_cache(maxsize=1)
def team() -> Callable[..., None] | None:
    """Return the entry to the OpenMP that torch is linked with, None where there is none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
    if _forked or not torch.backends.openmp.is_available() or not path.exists():
        return None
    parallel = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)  # a symbol of its libraries
    if parallel is not None:
        parallel.argtypes = (_Outlined, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
    return parallel


def _on_python_threads(work: Callable[[], None], threads: int) -> None:
    others = [_executor().submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        if not other.cancel():  # one that has not started would find nothing left
            other.result()


@lru_cache(maxsize=1)
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "dynchunk")


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True
    team.cache_clear()
    _executor.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
