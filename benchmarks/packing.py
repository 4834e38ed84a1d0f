"""Rows of tensor-core tiles that do useful work: ``python benchmarks/packing.py [--json]``.

Chunks of random scores, packed in three ways: each chunk in tiles of its own, whole chunks in
order, best-fit.
"""

from __future__ import annotations

import argparse
import json

import torch
from rich.console import Console
from rich.table import Table

from dynchunk import BoundaryRule, plan_tiles
from dynchunk.packing import TILES

RULES = (
    BoundaryRule(1, min_length=2, max_length=8),
    BoundaryRule(2, min_length=3, max_length=8),
    BoundaryRule(4, min_length=4, max_length=16),
    BoundaryRule(8, min_length=8, max_length=32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    scores = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    rows = []
    for rule in RULES:
        chunks = rule(scores)
        for tile in TILES:
            own_tiles = chunks.lengths.add(tile - 1).div(tile, rounding_mode="floor").sum()
            rows.append(
                {
                    "radius": rule.radius,
                    "lengths": [rule.min_length, rule.max_length],
                    "ratio": chunks.ratio,
                    "tile": tile,
                    "one_chunk_per_tile": chunks.num_tokens / (int(own_tiles) * tile),
                    "in_order": plan_tiles(chunks, tile, "stream").utilisation,
                    "best_fit": plan_tiles(chunks, tile, "best_fit").utilisation,
                }
            )
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    table = Table(title="useful share of tile rows, 1M random scores")
    for name in ("radius", "lengths", "ratio", "tile", "chunk by chunk", "in order", "best-fit"):
        table.add_column(name, justify="right")
    for row in rows:
        low, high = row["lengths"]
        shares = [f"{row[k]:.1%}" for k in ("one_chunk_per_tile", "in_order", "best_fit")]
        cells = (row["radius"], f"{low}..{high}", f"{row['ratio']:.2f}", row["tile"], *shares)
        table.add_row(*map(str, cells))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
