"""What benchmarks share: interleaved medians, the read ceiling, growth, tables."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dynchunk.ops.cpu._threads import run


def parser(description: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    arguments.add_argument("--repetitions", type=int, help="of each work; the median counts")
    arguments.add_argument("--threads", type=int, help="default: torch's")
    return arguments


def parse(arguments: argparse.ArgumentParser, repetitions: int) -> argparse.Namespace:
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.repetitions = options.repetitions or (3 if options.quick else repetitions)
    torch.manual_seed(0)
    return options


def median_seconds(works: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Run the works in turn, repeatedly, after a first run; return each one's median."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repetitions):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(mine) for name, mine in seconds.items()}


def first_call_seconds(work: Callable[[], object]) -> float:
    """Return the time of a first call: that of compiling, or of reading what is compiled."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, on huge pages where the system has them (numpy asks for them)."""
    x = torch.from_numpy(np.empty(shape, np.float32)).normal_()
    if dtype == torch.float32:
        return x
    storage = torch.from_numpy(np.empty(shape, np.int16)).view(dtype)
    return storage.copy_(x)


@njit(cache=True, nogil=True, fastmath=True)
def _sum(first, last, rows, out):
    for i in range(first, last):
        total = np.float32(0)
        for j in range(rows.shape[1]):
            total += rows[i, j]
        out[i] = total


def read_work(nbytes: int) -> Callable[[], object]:
    """Return a work that adds up an array of so many bytes, on all threads."""
    rows = np.ones((1024, max(nbytes // 4096, 1)), np.float32)
    out = np.empty(1024, np.float32)
    return lambda: run(_sum, 1024, rows, out)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the exponent p of the power law time ~ size^p, by least squares."""
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(slope)


def show(title: str, rows: list[dict[str, Any]], extra: dict[str, Any], as_json: bool) -> None:
    """Print rows as one JSON object or as a table; times in milliseconds there."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if as_json:
        print(json.dumps({"machine": machine, "rows": rows} | extra))
        return
    table = Table(title=f"{title} ({machine})")
    for name in rows[0]:
        table.add_column(
            name.replace("_s", ", ms") if name.endswith("_s") else name, justify="right"
        )
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    console = Console(width=200)
    console.print(table)
    for name, value in extra.items():
        console.print(f"{name}: {_cell(name, value)}")


def _cell(name: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value * 1e3:.2f}" if name.endswith("_s") else f"{value:.2f}"
    return str(value)
