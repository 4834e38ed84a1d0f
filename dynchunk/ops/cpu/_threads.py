"""Threads for compiled loops: Python's own, since they need nothing of the system.

numba's layers depend on what is installed (its own aborts when two threads of a program use it at
once), and a second OpenMP beside torch's would have two sets of threads wait actively.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

_TASKS_PER_THREAD = 16  # ranges a thread takes of a run: the last to finish is not far behind


@lru_cache(maxsize=1)
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "dynchunk")


os.register_at_fork(after_in_child=_executor.cache_clear)  # threads do not survive a fork


def run(kernel: Callable[..., None], n_tasks: int, *args: Any) -> None:
    """Call ``kernel(first, last, *args)`` on ranges that make up ``range(n_tasks)``.

    On ``torch.get_num_threads()`` threads, this one included. Which thread takes which range is
    left to chance: a task's result may depend on nothing but the task.
    """
    threads = min(torch.get_num_threads(), n_tasks)
    if threads <= 1:
        kernel(0, n_tasks, *args)
        return
    size = -(-n_tasks // (threads * _TASKS_PER_THREAD))
    ranges = iter(range(0, n_tasks, size))  # all threads draw from it

    def work() -> None:
        for first in ranges:
            kernel(first, min(first + size, n_tasks), *args)

    others = [_executor().submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            if not other.cancel():  # one that has not started would find nothing left
                other.result()
