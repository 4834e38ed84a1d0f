"""Correctness and speed of all kernels on the GPU at hand, in one run of a few minutes.

``PYTHONPATH=.:kernels python benchmarks/gpu.py``: needs torch 2.11, Triton 3.6 and a
CUDA device, and no install. First every operation is compared, forward and backward, with its
float64 reference on fresh random inputs, in memory that holds NaN; then all are timed beside a
large matrix product, a large copy, torch's dense attention and a fixed stride of the same ratio.
Writes ``benchmarks/results/gpu-<card>-<date>.json``. Exit code 1 if a result is wrong, 2 without a
CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

from dynchunk.bench import correctness, measured

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("correctness", "measured"), help="only this part")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where to write")
    arguments = parser.parse_args()
    if not measured.is_possible():
        print("not measured: there is no CUDA device here", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    found: dict[str, Any] = {"machine": machine(device), "correctness": [], "measured": []}
    if arguments.only != "measured":
        for check in correctness.check(device):
            found["correctness"].append(check._asdict() | {"ok": check.ok})
            print(line_of_check(check), flush=True)
    if arguments.only != "correctness":
        for row in measured.measure(device):
            found["measured"].append(row._asdict())
            print(line_of_measurement(row), flush=True)
    found["seconds"] = round(time.perf_counter() - begin, 1)
    path = write(found, arguments.folder)
    print(f"{found['seconds']:.0f} s; written: {path}")
    return 0 if all(check["ok"] for check in found["correctness"]) else 1


def machine(device: torch.device) -> dict[str, str]:
    return {
        "card": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def line_of_check(check: correctness.Check) -> str:
    verdict = "ok   " if check.ok else "WRONG"
    what = f"{check.operation} ({check.options}), {check.dtype}: {check.output}"
    return f"{verdict} {check.error:.1e} of {check.tolerance:.0e}  {what}"


def line_of_measurement(row: measured.Measurement) -> str:
    rate = ""
    if row.tflops is not None:
        rate = f"{row.tflops:8.1f} TFLOP/s"
    elif row.gigabytes is not None:
        rate = f"{row.gigabytes:8.0f} GB/s   "
    share = "" if row.of_ceiling is None else f"{row.of_ceiling:5.0%}"
    what = f"{row.operation}, {row.shape}, {row.direction}"
    return f"{row.milliseconds:9.3f} ms {rate:16} {share:5}  {what}"


def write(found: dict[str, Any], folder: Path) -> Path:
    card = re.sub(r"[^a-z0-9]+", "-", found["machine"]["card"].lower()).strip("-")
    path = folder / f"gpu-{card}-{found['machine']['date']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
