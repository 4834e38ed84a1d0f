"""Cost of a token that streams, with rollback: ``python benchmarks/streaming.py [--json]``.

One attention layer token by token; after every few tokens some of them are taken back, as in
speculative decoding. Ours keeps a compressed cache, boundaries and all counted; the peers keep all
keys and values: transformers' DynamicCache, and a buffer made large enough beforehand. A DeepSeek
V4 of one layer of each kind stands beside transformers' V4 cache, which cannot go back and so is
spared it. All have the same weights and run in turn; figures are medians. The exponent is that of
cost in the length. ``ceiling`` is the time in which compiled code on all threads adds up as many
bytes as ours holds and its weights have, over our time.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from common import read_work
from memory import held_bytes
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from v4_layer import Pair

import dynchunk
from dynchunk import BoundaryRule, FixedStride
from dynchunk.attention import ChunkedAttention, MeanPool, Policy
from dynchunk.attention.rope import rotate
from dynchunk.cache import Cache
from dynchunk.integrations.hf.cache import ChunkedCache
from dynchunk.ops.pool import pool

DIM, HEADS, KV_HEADS, WIDTH = 512, 16, 4, 64
PIECE = 1_000
PEERS = ("buffer", "DynamicCache", "V4 cache")
KINDS = ("csa", "hca")

POLICIES = {
    "fixed": Policy(FixedStride(4), window=128, reduction=MeanPool(), sink=False),
    "content": Policy(
        BoundaryRule(1, threshold=0.63, max_length=32),  # 4 tokens an entry on uniform scores
        window=128,
        reduction=MeanPool(),
        sink=False,
    ),
}


class Ours:
    """A layer with a compressed cache."""

    def __init__(self, layer: ChunkedAttention, tokens: int) -> None:
        self.layer, self.cache = layer, Cache(layer.policy)
        self.by_content = isinstance(layer.policy.boundaries, BoundaryRule)
        state = self.cache.layers[0]
        for begin in range(0, tokens, PIECE):  # keys and values, without queries
            piece = min(PIECE, tokens - begin)
            self._announce(piece)
            k, v = torch.randn(2, piece, KV_HEADS, WIDTH)
            pooled = state.extend(k=k, v=v, raw_k=k)
            if pooled is not None and state.step.closed is not None:
                (spans,) = state.step.closed.spans
                state.close([pool(pooled["raw_k"], spans)], [pool(pooled["v"], spans)])
            state.finish()

    def step(self, x: Tensor) -> None:
        """Take a token."""
        self._announce(1)
        self.layer(x, cache=self.cache.layers[0])

    def take_back(self, n: int) -> None:
        """Drop the last tokens."""
        self.cache.crop(-n)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.cache.nbytes

    def _announce(self, n: int) -> None:
        self.cache.append(n, torch.rand(n) if self.by_content else ())


class Full:
    """The same layer with all keys and values in a ``DynamicCache`` or a large enough buffer."""

    def __init__(self, layer: ChunkedAttention, tokens: int, *, dynamic: bool) -> None:
        self.layer, self.length = layer, tokens
        size = tokens if dynamic else tokens + 1_000
        k, v = torch.randn(2, 1, KV_HEADS, size, WIDTH)
        self.dynamic = DynamicCache() if dynamic else None
        if self.dynamic is not None:
            self.dynamic.update(k, v, 0)
        self.buffers = None if dynamic else (k, v)

    def step(self, x: Tensor) -> None:
        """Take a token."""
        layer, position = self.layer, torch.tensor([self.length])
        q = rotate(layer._heads(layer.q_proj(x), layer.q_norm), position, layer.policy.rope)
        k = rotate(layer._heads(layer.k_proj(x), layer.k_norm), position, layer.policy.rope)
        v = layer._heads(layer.v_proj(x), None)
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
        all_k, all_v = self._update(k, v)
        out = scaled_dot_product_attention(q, all_k, all_v, enable_gqa=True)
        layer.o_proj(out.transpose(1, 2).flatten(2))

    def take_back(self, n: int) -> None:
        """Drop the last tokens."""
        self.length -= n
        if self.dynamic is not None:
            self.dynamic.crop(-n)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = self.buffers
        if self.dynamic is not None:
            held = (self.dynamic.layers[0].keys, self.dynamic.layers[0].values)
        return sum(x.untyped_storage().nbytes() for x in held)

    def _update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length += 1
        if self.dynamic is not None:
            return self.dynamic.update(k, v, 0)
        for buffer, x in zip(self.buffers, (k, v), strict=True):
            buffer[:, :, self.length - 1 : self.length] = x
        return tuple(buffer[:, :, : self.length] for buffer in self.buffers)


class V4:
    """A DeepSeek V4 of one layer, wrapped or as it is."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model, self.cache = model, None
        for begin in range(0, tokens, PIECE):
            piece = min(PIECE, tokens - begin)
            self._forward(torch.randn(1, piece, model.config.hidden_size))

    def step(self, x: Tensor) -> None:
        """Take a token."""
        self._forward(x[None, :, : self.model.config.hidden_size])

    def take_back(self, n: int) -> None:
        """Drop the last tokens, if it can."""
        if isinstance(self.cache, ChunkedCache):
            self.cache.crop(-n)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return held_bytes(self.cache)

    def _forward(self, x: Tensor) -> None:
        self.cache = self.model.model(inputs_embeds=x, cache=self.cache, use_cache=True).cache


class Ceiling:
    """What has to be read for a token at least: the weights and what the cache holds, added up."""

    def __init__(self, run: Ours | V4) -> None:
        module = run.model if isinstance(run, V4) else run.layer
        weights = sum(x.numel() * x.element_size() for x in module.parameters())
        self.read = read_work(weights + run.nbytes)

    def step(self, x: Tensor) -> None:
        """Read all."""
        self.read()

    def take_back(self, n: int) -> None:
        """There is nothing to drop."""


Run = Ours | Full | V4 | Ceiling


def seconds(run: Run, tokens: int, every: int, back: int) -> float:
    """Return the time per token, rollbacks included."""
    x = torch.randn(tokens, DIM)
    begin = time.perf_counter()
    for i in range(tokens):
        run.step(x[i : i + 1])
        if (i + 1) % every == 0:
            run.take_back(back)
    return (time.perf_counter() - begin) / tokens


def medians(runs: dict[str, Run], arguments: argparse.Namespace) -> dict[str, float]:
    """Run all in turn, again and again."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(arguments.repetitions + 1):
        for name, run in runs.items():
            took = seconds(run, arguments.tokens, arguments.every, arguments.back)
            if repetition:  # the first one warms up
                found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_000, 8_000, 32_000])
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a repetition")
    parser.add_argument("--every", type=int, default=8, help="tokens between rollbacks")
    parser.add_argument("--back", type=int, default=4, help="tokens taken back")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result, arguments)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each length and kind of boundaries, and the exponents."""
    layers = {
        name: ChunkedAttention(policy, DIM, HEADS, KV_HEADS, WIDTH)
        for name, policy in POLICIES.items()
    }
    for layer in layers.values():
        layer.load_state_dict(layers["fixed"].state_dict())
    models = {kind: Pair(kind, hidden=DIM // 2).model for kind in KINDS}
    wrapped = {kind: dynchunk.wrap(copy.deepcopy(model)) for kind, model in models.items()}
    took: dict[str, dict[int, float]] = defaultdict(dict)
    rows = []
    for n in arguments.lengths:
        ours: dict[str, Run] = {name: Ours(layer, n) for name, layer in layers.items()}
        peers: dict[str, Run] = {
            "buffer": Full(layers["fixed"], n, dynamic=False),
            "DynamicCache": Full(layers["fixed"], n, dynamic=True),
        }
        rows += compare(n, ours, dict.fromkeys(ours, peers), took, arguments)
        ours = {f"V4 {kind}": V4(wrapped[kind], n) for kind in KINDS}
        theirs = {f"V4 {kind}": {"V4 cache": V4(models[kind], n)} for kind in KINDS}
        rows += compare(n, ours, theirs, took, arguments)
    return {"rows": rows, "exponents": {name: _exponent(times) for name, times in took.items()}}


def compare(
    n: int,
    ours: dict[str, Run],
    peers: dict[str, dict[str, Run]],
    took: dict[str, dict[int, float]],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row for each of ours beside its peers, all run in turn."""
    others = {(id(run), peer): run for mine in peers.values() for peer, run in mine.items()}
    ceilings = {("ceiling", name): Ceiling(run) for name, run in ours.items()}
    found = medians(ours | others | ceilings, arguments)
    rows = []
    for name, run in ours.items():
        times = {peer: found[id(one), peer] for peer, one in peers[name].items()}
        state = run.cache.state if isinstance(run, V4) else run.cache
        took[name][n] = found[name]
        for peer, time_of_peer in times.items():
            took[f"{peer} beside {name}" if isinstance(run, V4) else peer][n] = time_of_peer
        rows.append(
            {
                "tokens": n,
                "boundaries": name,
                "ratio": state.chunks()[0].ratio,
                "ours": found[name],
                "peers": times,
                "times_faster": {peer: time / found[name] for peer, time in times.items()},
                "ceiling": found["ceiling", name] / found[name],
                "ours_bytes": run.nbytes,
                "peers_bytes": {peer: one.nbytes for peer, one in peers[name].items()},
            }
        )
    return rows


def show(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the table."""
    every, back = arguments.every, arguments.back
    table = Table(title=f"a token of one layer, {back} taken back every {every}")
    names = "context|boundaries|ratio|us|x buffer|x DynamicCache|x V4 cache|bytes/token|x fewer"
    names += "|ceiling"
    for name in names.split("|"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        faster = row["times_faster"]
        cells = [str(row["tokens"]), row["boundaries"], f"{row['ratio']:.2f}"]
        cells += [f"{row['ours'] * 1e6:.0f}"]
        cells += [f"{faster[peer]:.2f}" if peer in faster else "-" for peer in PEERS]
        cells += [f"{row['ours_bytes'] / row['tokens']:.0f}"]
        cells += [f"{max(row['peers_bytes'].values()) / row['ours_bytes']:.2f}"]
        table.add_row(*cells, f"{row['ceiling']:.2f}")
    console = Console(width=120)
    console.print(table)
    exponents = {name: round(x, 2) for name, x in result["exponents"].items()}
    console.print("cost ~ length ^", exponents)


def _exponent(took: dict[int, float]) -> float:
    """Return the slope of cost in the length, both as logarithms."""
    if len(took) < 2:
        return float("nan")
    lengths, seconds_each = np.log(list(took)), np.log(list(took.values()))
    return float(np.polyfit(lengths, seconds_each, 1)[0])


if __name__ == "__main__":
    main()
