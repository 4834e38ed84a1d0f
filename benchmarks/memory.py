"""Peak memory of a prompt: ``python benchmarks/memory.py [--quick] [--json]``.

Each work runs in a process of its own; the figure is how far the first call raises the process's
peak above what it held before. Attention alone (``attend`` beside causal SDPA and beside matmul and
softmax under a mask) and DeepSeek V4 layers beside transformers' with the same weights.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import torch
from common import parse, parser, random, show
from torch.nn.functional import scaled_dot_product_attention as sdpa

H, H_KV, D, RATIO, WINDOW = 16, 8, 128, 4, 128
WORKS = {"attend": ("ours", "sdpa", "matmul")} | dict.fromkeys(("csa", "hca"), ("ours", "theirs"))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prepared(work: str, who: str, tokens: int):
    """Return a function of a prompt, after a call on a short one: all is compiled then."""
    if work != "attend":
        from v4_layer import Pair

        pair = Pair(work)
        make = pair.ours_work if who == "ours" else pair.theirs_work
        make(torch.randn(256, pair.ours.sizes.dim))()
        return make(torch.randn(tokens, pair.ours.sizes.dim))
    make = {"ours": attend_work, "sdpa": sdpa_work, "matmul": matmul_work}[who]
    make(256)()
    return make(tokens)


def attend_work(tokens: int):
    from dynchunk import Chunks
    from dynchunk.ops.attend import attend
    from dynchunk.ops.layout import Reads

    chunks = Chunks.fixed(RATIO, tokens)
    q, k, v = random(tokens, H, D), random(tokens, H_KV, D), random(tokens, H_KV, D)
    entry_k, entry_v = (random(len(chunks), H_KV, D) for _ in range(2))
    return lambda: attend(q, k, v, entry_k, entry_v, Reads.of(chunks, window=WINDOW))


def sdpa_work(tokens: int):
    q, k, v = random(1, H, tokens, D), random(1, H_KV, tokens, D), random(1, H_KV, tokens, D)
    return lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)


def matmul_work(tokens: int):
    q, k, v = random(H_KV, H // H_KV, tokens, D), *(random(H_KV, 1, tokens, D) for _ in "kv")
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)
    return lambda: (q @ k.transpose(-1, -2) * D**-0.5 + mask).softmax(-1) @ v


def measure(work: str, who: str, tokens: int) -> int:
    command = [sys.executable, __file__, "--child", work, who, str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(work: str, who: str, tokens: str) -> None:
    run = prepared(work, who, int(tokens))
    before = peak_bytes()
    run()
    print(peak_bytes() - before)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+")
    arguments.add_argument("--limit", type=int, default=8192, help="tokens for what is quadratic")
    options = parse(arguments, 1)
    rows = []
    for work, names in WORKS.items():
        for tokens in options.tokens or ([2048] if options.quick else [4096, 8192, 16384, 32768]):
            row: dict[str, object] = {"work": work, "tokens": tokens}
            for who in ("ours", "sdpa", "matmul", "theirs"):
                if who in names and (who in ("ours", "sdpa") or tokens <= options.limit):
                    row[f"{who}, MiB"] = measure(work, who, tokens) / 2**20
                    if who != "ours":
                        row[f"{who} / ours"] = row[f"{who}, MiB"] / max(row["ours, MiB"], 1e-3)
                else:
                    row |= {f"{who}, MiB": None} | (
                        {} if who == "ours" else {f"{who} / ours": None}
                    )
            row["ours, bytes per token"] = row["ours, MiB"] * 2**20 / tokens
            rows.append(row)
    show("peak memory above what was held", rows, {}, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
