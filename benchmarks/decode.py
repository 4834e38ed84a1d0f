"""One decode step beside torch's attention: ``python benchmarks/decode.py [--quick] [--json]``.

Median of interleaved repetitions in one process. ``full`` is the fastest formulation that torch has
(SDPA with enable_gqa, SDPA with the heads of a group as queries, matmul and softmax, with --flex a
compiled flex_attention) over the cache of all tokens, ``same`` over a cache of as many rows as ours
has; ``ceiling`` is the time in which as many bytes are added up by compiled code on all threads,
over our time. Grouped queries, 16 heads on 8 KV heads of 128 channels, window 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from common import first_call_seconds, median_seconds, parse, parser, random, read_work, show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from dynchunk import BoundaryRule, Chunks, calibrate
from dynchunk.ops.decode import decode
from dynchunk.ops.layout import Reads

H, H_KV, D = 16, 8, 128
WINDOW, PAGE = 128, 64


def entries(context: int, ratio: int, content: bool) -> int:
    """Return how many entries the last token of a context sees."""
    chunks = Chunks.fixed(ratio, context)
    if content:
        scores = torch.rand(context, generator=torch.Generator().manual_seed(0))
        rule = calibrate(BoundaryRule(0, max_length=8 * ratio), scores, ratio, tolerance=0.01)
        chunks = rule(scores)
    return int(Reads.of(chunks, window=WINDOW, cu_seqlens_q=[0, 1]).n_visible)


def ours(n: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Return a step over n entries in pages and the window, and the bytes that it reads."""
    n_pages = -(-n // PAGE)
    pages = torch.randperm(n_pages)[None, None]
    entry_k, entry_v = (random(n_pages, PAGE, H_KV, D, dtype=dtype) for _ in range(2))
    k, v = (random(WINDOW, H_KV, D, dtype=dtype) for _ in range(2))
    q = random(1, H, D, dtype=dtype)
    zero = torch.zeros(1, dtype=torch.int64)
    counts = torch.tensor([[n]])
    where = (pages, zero, counts, zero[None], zero + WINDOW)
    return (
        lambda: decode(q, k, v, entry_k, entry_v, *where),
        2 * (n + WINDOW) * H_KV * D * q.element_size(),
    )


def peers(rows: int, dtype: torch.dtype, flex: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    q, k, v = (
        random(1, H, 1, D, dtype=dtype),
        *(random(1, H_KV, rows, D, dtype=dtype) for _ in "kv"),
    )
    grouped = q.view(1, H_KV, H // H_KV, D)
    yield "sdpa", lambda: sdpa(q, k, v, enable_gqa=True)
    yield "grouped", lambda: sdpa(grouped, k, v)
    yield "matmul", lambda: matmul_softmax(grouped, k, v)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        yield "flex", lambda: compiled(q, k, v, enable_gqa=True)


def matmul_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)) * D**-0.5).softmax(-1) @ v


def measure(
    context: int, ratio: int, repetitions: int, limit: float, flex: bool
) -> list[dict[str, object]]:
    """Return a row for fixed and one for content boundaries, measured in turn."""
    counts = {kind: entries(context, ratio, kind == "content") for kind in ("fixed", "content")}
    works: dict[str, Callable[[], object]] = {}
    for kind, n in counts.items():
        works[kind], nbytes = ours(n, torch.float32)
        works[f"{kind} bf16"], _ = ours(n, torch.bfloat16)
        works[f"{kind} ceiling"] = read_work(nbytes)
    rows = {"same": counts["fixed"] + WINDOW}
    if 8 * context * H_KV * D <= limit * 2**30:
        rows["full"] = context
    for whose, n in rows.items():
        works |= {f"{whose} {name}": work for name, work in peers(n, torch.float32, flex)}
    seconds = median_seconds(works, repetitions)
    return [_row(context, kind, n, seconds) for kind, n in counts.items()]


def _row(context: int, kind: str, n: int, seconds: dict[str, float]) -> dict[str, object]:
    mine = seconds[kind]
    row: dict[str, object] = {
        "context": context,
        "boundaries": kind,
        "ratio": context / n,
        "ours_s": mine,
    }
    for whose in ("full", "same"):
        of_peers = [(s, name) for name, s in seconds.items() if name.startswith(f"{whose} ")]
        best = min(of_peers, default=None)
        row[f"{whose}_s"] = best and best[0]
        row[f"{whose} / ours"] = best and best[0] / mine
        row[f"fastest {whose}"] = best and best[1].removeprefix(f"{whose} ")
    row["ceiling"] = seconds[f"{kind} ceiling"] / mine
    row["fp32 / bf16"] = mine / seconds[f"{kind} bf16"]
    row["over fixed"] = mine / seconds["fixed"]
    row["medians"] = {name: round(s, 6) for name, s in seconds.items()}
    return row


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--context", type=int, nargs="+", help="tokens")
    arguments.add_argument("--ratio", type=int, nargs="+", help="tokens per entry")
    arguments.add_argument("--full-limit", type=float, default=1.5, help="GiB of a full cache")
    arguments.add_argument("--flex", action="store_true", help="flex_attention too (compiles)")
    options = parse(arguments, 11)
    contexts = options.context or (
        [8192, 32768] if options.quick else [8192, 32768, 131072, 1 << 20]
    )
    ratios = options.ratio or ([4] if options.quick else [2, 4, 8, 128])
    compiling = first_call_seconds(ours(256, torch.float32)[0])
    rows = [
        row
        for context in contexts
        for ratio in ratios
        for row in measure(context, ratio, options.repetitions, options.full_limit, options.flex)
    ]
    if not options.json:
        for row in rows:
            del row["medians"]
    show("one decode step", rows, {"first_call_seconds": compiling}, options.json)


if __name__ == "__main__":
    main()
