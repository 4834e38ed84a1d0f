"""Peak memory of a prompt: ``python benchmarks/memory.py [--quick] [--json]``.

Each work runs in a process of its own; the figure is how far the first call raises the process's
peak above what it held before. Attention alone (``attend`` beside causal SDPA and beside matmul and
softmax under a mask), DeepSeek V4 layers beside transformers' with the same weights, and caches
that a prompt fills piece by piece: a layer's beside the DynamicCache of the same layer with full
attention, a V4 model's beside transformers' V4 cache, with the bytes that they hold in the end.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import parse, parser, random, show
from torch.nn.functional import scaled_dot_product_attention as sdpa

H, H_KV, D, RATIO, WINDOW = 16, 8, 128, 4, 128
LAYERS, CACHES = ("csa", "hca"), ("cache", "csa cache", "hca cache")
WORKS = {"attend": ("ours", "sdpa", "matmul")} | dict.fromkeys(LAYERS + CACHES, ("ours", "theirs"))
DIM, PIECE = 512, 512


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prepared(work: str, who: str, tokens: int):
    """Return a function of a prompt, after a call on a short one: all is compiled then."""
    if work in CACHES:
        fill = layer_cache(who) if work == "cache" else v4_cache(work.split()[0], who)
        fill(2 * PIECE)
        return lambda: fill(tokens)
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


def layer_cache(who: str) -> Callable[[int], Any]:
    """Return a function that fills the cache of one layer, 4 tokens an entry or all keys."""
    from transformers import DynamicCache

    from dynchunk import FixedStride
    from dynchunk.attention import ChunkedAttention, MeanPool, Policy
    from dynchunk.cache import Cache

    policy = Policy(FixedStride(RATIO), window=WINDOW, reduction=MeanPool(), sink=False)
    layer = ChunkedAttention(policy, DIM, H, H_KV, 64)

    @torch.no_grad()
    def fill(tokens: int) -> Any:
        cache = Cache(policy) if who == "ours" else DynamicCache()
        for first in range(0, tokens, PIECE):
            x = torch.randn(PIECE, DIM)
            if who == "ours":
                cache.append(PIECE)
                layer(x, cache=cache.layers[0])
            else:
                full_attention(layer, x, first, cache)
        return cache

    return fill


def full_attention(layer, x: torch.Tensor, first: int, cache) -> None:
    """Let a layer read all tokens of a DynamicCache, with the same weights."""
    from dynchunk.attention.rope import rotate

    position, rope = torch.arange(first, first + len(x)), layer.policy.rope
    q = rotate(layer._heads(layer.q_proj(x), layer.q_norm), position, rope)
    k = rotate(layer._heads(layer.k_proj(x), layer.k_norm), position, rope)
    v = layer._heads(layer.v_proj(x), None)
    k, v = cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], 0)
    visible = torch.arange(k.shape[2]) <= position[:, None]
    out = sdpa(q.transpose(0, 1)[None], k, v, attn_mask=visible, enable_gqa=True)
    layer.o_proj(out.transpose(1, 2).flatten(2))


def v4_cache(kind: str, who: str) -> Callable[[int], Any]:
    """Return a function that fills the cache of a DeepSeek V4 of one layer of a kind."""
    from v4_layer import Pair

    import dynchunk

    model = Pair(kind).model
    if who == "ours":
        dynchunk.wrap(model)

    @torch.no_grad()
    def fill(tokens: int) -> Any:
        cache = None
        for _ in range(0, tokens, PIECE):
            x = torch.randn(1, PIECE, model.config.hidden_size)
            cache = model.model(inputs_embeds=x, cache=cache, use_cache=True).cache
        return cache

    return fill


def held_bytes(cache: Any) -> int:
    """Return the bytes that a cache holds: every storage of it once, whole."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    states = []
    for value in (x for layer in cache.layers for x in vars(layer).values()):
        states += value.values() if isinstance(value, dict) else [value]
    tensors = [x for x in states if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def measure(work: str, who: str, tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", work, who, str(tokens)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(work: str, who: str, tokens: str) -> None:
    run = prepared(work, who, int(tokens))
    before = peak_bytes()
    result = run()
    rise = peak_bytes() - before
    print(json.dumps({"rise": rise, "held": held_bytes(result) if work in CACHES else None}))


def row_of(work: str, tokens: int, limit: int) -> dict[str, Any]:
    """Measure a work of everybody who has it; what is quadratic up to ``limit`` tokens."""
    row: dict[str, Any] = {"work": work, "tokens": tokens}
    held = {}
    for who in ("ours", "sdpa", "matmul", "theirs"):
        mine = who in WORKS[work]
        mine = mine and (who in ("ours", "sdpa") or work in CACHES or tokens <= limit)
        found = measure(work, who, tokens) if mine else {"rise": None, "held": None}
        rise, held[who] = found["rise"], found["held"]
        row[f"{who}, MiB"] = None if rise is None else rise / 2**20
        if who != "ours":
            least = max(row["ours, MiB"], 1e-3)
            row[f"{who} / ours"] = None if rise is None else row[f"{who}, MiB"] / least
    row["ours, bytes per token"] = row["ours, MiB"] * 2**20 / tokens
    for who in ("ours", "theirs"):
        row[f"{who} held, bytes per token"] = None if held[who] is None else held[who] / tokens
    return row


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--works", choices=list(WORKS), nargs="+", default=list(WORKS))
    arguments.add_argument("--tokens", type=int, nargs="+")
    arguments.add_argument("--limit", type=int, default=8192, help="tokens for what is quadratic")
    options = parse(arguments, 1)
    sizes = options.tokens or ([2048] if options.quick else [4096, 8192, 16384, 32768])
    rows = [row_of(work, tokens, options.limit) for work in options.works for tokens in sizes]
    show("peak memory above what was held", rows, {}, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
