"""Forward and backward of one layer: ``python benchmarks/train.py [--quick] [--json]``.

A :class:`~dynchunk.attention.ChunkedAttention` of entries of 4 tokens and a window beside the same
projections and norms with causal SDPA over all tokens. Median of interleaved repetitions.
"""

from __future__ import annotations

import torch
from common import exponent, median_seconds, parse, parser, show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from dynchunk import Chunks, FixedStride
from dynchunk.attention import ChunkedAttention, Layout, Policy
from dynchunk.attention.rope import rotate

DIM, HEADS, KV_HEADS, HEAD_DIM, RATIO, WINDOW = 512, 8, 4, 64, 4, 128


def full_attention(layer: ChunkedAttention, x: Tensor) -> Tensor:
    """Mix with the layer's own projections, norms and RoPE, every query reading all before it."""
    position = torch.arange(len(x))
    q = layer.q_norm(layer.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM)))
    k = layer.k_norm(layer.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM)))
    v = layer.v_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM))
    q, k = (rotate(t, position, layer.policy.rope) for t in (q, k))
    heads = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = sdpa(*heads, is_causal=True, enable_gqa=True)[0]
    return layer.o_proj(out.transpose(0, 1).flatten(1))


def measure(tokens: int, repetitions: int) -> dict[str, object]:
    layer = ChunkedAttention(
        Policy(FixedStride(RATIO), window=WINDOW), DIM, HEADS, KV_HEADS, HEAD_DIM
    )
    x = torch.randn(tokens, DIM, requires_grad=True)
    chunks = Chunks.fixed(RATIO, tokens)

    def ours() -> None:
        layer(x, Layout.of(layer.policy, chunks)).out.square().sum().backward()

    def full() -> None:
        full_attention(layer, x).square().sum().backward()

    seconds = median_seconds({"ours": ours, "full": full}, repetitions)
    return {
        "tokens": tokens,
        "ours_s": seconds["ours"],
        "full_s": seconds["full"],
        "full / ours": seconds["full"] / seconds["ours"],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+")
    options = parse(arguments, 5)
    sizes = options.tokens or ([512, 1024] if options.quick else [1024, 2048, 4096, 8192])
    rows = [measure(tokens, options.repetitions) for tokens in sizes]
    growth = {}
    if len(sizes) > 1:
        for who in ("ours", "full"):
            growth[f"exponent, {who}"] = exponent(sizes, [float(row[f"{who}_s"]) for row in rows])
    show("forward and backward of a layer", rows, growth, options.json)


if __name__ == "__main__":
    main()
