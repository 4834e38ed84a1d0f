"""A prompt beside torch's and transformers' attention: ``python benchmarks/prefill.py [--json]``.

Median of interleaved repetitions in one process. First attention alone: ``attend`` over entries of
4 tokens and a window of 128 beside SDPA over all tokens (causal) and, with --flex, a compiled
flex_attention with the same block mask. Then DeepSeek V4 layers (CSA, HCA) with transformers'
weights, outputs compared; and the exponent of our time over the number of tokens. With --flash the
same layers in V4-Flash's own sizes, ours alone: one prompt, once, through a cache in pieces of
2,048 tokens, with the time that each length had taken.
"""

from __future__ import annotations

import time

import torch
from common import exponent, median_seconds, parse, parser, random, show
from torch.nn.functional import scaled_dot_product_attention as sdpa
from v4_layer import KINDS, Pair

from dynchunk import Chunks
from dynchunk.attention import csa, hca
from dynchunk.attention.deepseek_v4 import V4Attention, V4Sizes
from dynchunk.cache import Cache
from dynchunk.ops.attend import attend
from dynchunk.ops.layout import Reads

H, H_KV, D, RATIO, WINDOW = 16, 8, 128, 4, 128
PIECE = 2048


def attention(tokens: int, repetitions: int, flex: bool) -> dict[str, object]:
    chunks = Chunks.fixed(RATIO, tokens)
    reads = Reads.of(chunks, window=WINDOW)
    q, k, v = random(tokens, H, D), random(tokens, H_KV, D), random(tokens, H_KV, D)
    entry_k, entry_v = (random(len(chunks), H_KV, D) for _ in range(2))
    Q, K, V = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    works = {
        "ours": lambda: attend(q, k, v, entry_k, entry_v, reads),
        "sdpa": lambda: sdpa(Q, K, V, is_causal=True, enable_gqa=True),
    }
    if flex:
        works["flex"] = flex_work(Q, K, V, entry_k, entry_v)
    seconds = median_seconds(works, repetitions)
    return _row("attend", tokens, seconds)


def flex_work(Q, K, V, entry_k, entry_v):
    """Return flex_attention over the same entries and tokens, put into one sequence of keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = len(entry_k)

    def reads(b, h, t, s):
        is_entry = (s < n) & (s < (t + 1) // RATIO)
        return is_entry | ((s >= n) & (s - n <= t) & (s - n > t - WINDOW))

    mask = create_block_mask(reads, None, None, Q.shape[2], n + K.shape[2], device="cpu")
    rows = [torch.cat([e.transpose(0, 1)[None], x], 2) for e, x in ((entry_k, K), (entry_v, V))]
    compiled = torch.compile(flex_attention)
    return lambda: compiled(Q, *rows, block_mask=mask, enable_gqa=True)


def layer(pair: Pair, kind: str, tokens: int, repetitions: int, limit: int) -> dict[str, object]:
    x = torch.randn(tokens, pair.ours.sizes.dim)
    works = {"ours": pair.ours_work(x)}
    difference = None
    if tokens <= limit:
        works["transformers"] = pair.theirs_work(x)
        outs = [work() for work in works.values()]
        difference = float((outs[0] - outs[1]).norm() / outs[1].norm())
    repetitions = min(repetitions, 3) if tokens > 2048 else repetitions
    row = _row(f"V4 {kind}", tokens, median_seconds(works, repetitions))
    return row | {"relative RMS": difference and f"{difference:.1e}"}


def flash(kind: str, sizes: list[int]) -> list[dict[str, object]]:
    """Return a row for each length on the way to the longest, of a layer of V4-Flash's sizes."""
    policy = {"csa": csa, "hca": hca}[kind]()
    layer, cache = V4Attention(policy, V4Sizes()).eval(), Cache(policy)
    seconds, rows = 0.0, []
    for first in range(-PIECE, max(sizes), PIECE):
        x = torch.randn(PIECE, layer.sizes.dim)
        start = time.perf_counter()
        cache.append(PIECE)
        layer(x, cache=cache.layers[0])
        seconds += time.perf_counter() - start
        if first < 0:  # what has to be compiled is compiled
            seconds, cache = 0.0, Cache(policy)
        if first + PIECE in sizes:
            rows.append(_row(f"V4-Flash {kind}", first + PIECE, {"ours": seconds}))
    return rows


def _row(name: str, tokens: int, seconds: dict[str, float]) -> dict[str, object]:
    row: dict[str, object] = {"work": name, "tokens": tokens, "ours_s": seconds["ours"]}
    for peer in ("sdpa", "flex", "transformers"):
        row[f"{peer}_s"] = seconds.get(peer)
        row[f"{peer} / ours"] = seconds[peer] / seconds["ours"] if peer in seconds else None
    return row | {"relative RMS": None}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+")
    arguments.add_argument("--limit", type=int, default=8192, help="tokens for transformers")
    arguments.add_argument("--sdpa-limit", type=int, default=16384, help="tokens for SDPA")
    arguments.add_argument("--flex", action="store_true", help="flex_attention too (compiles)")
    arguments.add_argument("--flash", action="store_true", help="V4-Flash's sizes too (minutes)")
    options = parse(arguments, 5)
    sizes = options.tokens or (
        [1024, 2048] if options.quick else [1024, 4096, 8192, 16384, 32768, 65536]
    )
    rows = [
        attention(tokens, options.repetitions, options.flex)
        for tokens in sizes
        if tokens <= options.sdpa_limit
    ]
    growth = {}

    def add(name: str, mine: list[dict[str, object]]) -> None:
        long = [row for row in mine if row["tokens"] >= min(8192, sizes[-1] // 2)]
        if len(long) > 1:
            tokens, seconds = ([row[key] for row in long] for key in ("tokens", "ours_s"))
            growth[f"{name}: exponent of our time"] = exponent(tokens, seconds)
        rows.extend(mine)

    for kind in KINDS:
        pair = Pair(kind)
        layers = [layer(pair, kind, n, options.repetitions, options.limit) for n in sizes]
        add(f"V4 {kind}", layers)
    for kind in KINDS if options.flash else ():
        add(f"V4-Flash {kind}", flash(kind, sizes))
    show("a prompt", rows, growth, options.json)


if __name__ == "__main__":
    main()
