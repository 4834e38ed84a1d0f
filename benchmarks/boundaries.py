"""The boundary rule beside its peers: ``python benchmarks/boundaries.py [--json]``.

Everything is a ratio of times measured side by side in this run, the median of interleaved
repetitions: the rule against one ``torch.cumsum`` pass over the same scores and against the same
rule by ``scipy.ndimage.maximum_filter1d``; its cost per token from 64k to 16M tokens; and
microseconds per token when scores come one at a time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.ndimage import maximum_filter1d
from torch import Tensor

from dynchunk import BoundaryRule, Kind

TOKENS = 1 << 24
RULES = {
    2: BoundaryRule(2, max_length=16),
    8: BoundaryRule(8, min_length=4, max_length=64),
    60: BoundaryRule(60, min_length=8, max_length=512),
}


@dataclass(frozen=True)
class Row:
    """Figures of one radius."""

    radius: int
    over_cumsum: float  # time of the rule / time of torch.cumsum
    scipy_over_rule: float  # time of the scipy form / time of the rule
    growth: float  # time per token at 16M tokens / at 64k
    stream_us: float  # per token, one float at a time
    stream_tensor_us: float  # per token, one tensor [1] at a time


def median_seconds(works: list[Callable[[], object]], repetitions: int) -> list[float]:
    """Run the works in turn, repeatedly; return each one's median."""
    seconds: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(repetitions):
        for mine, work in zip(seconds, works, strict=True):
            start = time.perf_counter()
            work()
            mine.append(time.perf_counter() - start)
    return [statistics.median(mine) for mine in seconds]


def scipy_content_boundaries(scores: np.ndarray, radius: int) -> np.ndarray:
    """Content boundaries (threshold -inf) by the library's running maximum; no forced cuts."""
    low = np.float32(-np.inf)
    # window[t] = max of scores[t .. t + radius - 1]
    window = maximum_filter1d(scores, radius, mode="constant", cval=low, origin=-(radius // 2))
    left = np.full_like(scores, low)
    left[radius:] = window[:-radius]
    for t in range(1, radius):
        left[t] = scores[:t].max()
    right = np.full_like(scores, low)
    right[:-1] = window[1:]
    is_content = (scores > left) & (scores >= right)
    is_content[0] = False
    return np.flatnonzero(is_content[: len(scores) - radius])


def measure(radius: int, rule: BoundaryRule, scores: Tensor, repetitions: int) -> Row:
    array = scores.numpy()
    chunks = rule(scores)
    content = chunks.starts[chunks.kinds == Kind.CONTENT].numpy()
    if not np.array_equal(content, scipy_content_boundaries(array, radius)):
        raise AssertionError("the scipy form and the rule disagree: the comparison means nothing")
    ours, cumsum, scipy = median_seconds(
        [
            lambda: rule(scores),
            lambda: torch.cumsum(scores, 0),
            lambda: scipy_content_boundaries(array, radius),
        ],
        repetitions,
    )
    short = scores[: 1 << 16].clone()
    (per_short,) = median_seconds([lambda: rule(short)], 20 * repetitions)
    growth = (ours / len(scores)) / (per_short / len(short))
    floats, tensors = scores[:100_000].tolist(), scores[:100_000].split(1)
    stream = [stream_seconds(rule, pieces) / len(pieces) * 1e6 for pieces in (floats, tensors)]
    return Row(radius, ours / cumsum, scipy / ours, growth, *stream)


def stream_seconds(rule: BoundaryRule, pieces: list[float] | tuple[Tensor, ...]) -> float:
    def run() -> None:
        push = rule.stream().push
        for piece in pieces:
            push(piece)

    return median_seconds([run], 5)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    scores = torch.rand(TOKENS, generator=torch.Generator().manual_seed(0))
    rows = [measure(radius, rule, scores, arguments.repetitions) for radius, rule in RULES.items()]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
        return
    table = Table(title=f"boundary rule on {TOKENS / 2**20:.0f}M float32 scores ({machine})")
    for name in (
        "radius",
        "time / cumsum",
        "scipy form / time",
        "per token, 16M / 64k",
        "stream, us a float",
        "us a tensor [1]",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        radius, *figures = asdict(row).values()
        table.add_row(str(radius), *(f"{figure:.2f}" for figure in figures))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
