"""What scores of chunks miss: ``python benchmarks/selection_scores.py [--quick] [--json]``.

The attention that a query head of SmolLM2-135M-Instruct pays to tokens that it would not read, were
it to read only a share of those between the first 4 and the last 64: means over documents, layers,
heads and the last queries of a prompt of 1,024 tokens. ``bound``: Quest's; ``estimate``: the
normalised one; ``exact``: the mean weight of a chunk's tokens, which no cheap score knows;
``tokens``: the best tokens instead of chunks. Lower is better.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

import torch
from common import parse, parser, show
from torch import Tensor
from training_free import FIRST, MODULES, WINDOW, Batch, Model, Scorer, documents, manual, source

from dynchunk import BoundaryRule, Chunks, HashScore
from dynchunk.ops.budget import best_within
from dynchunk.selection import chunk_bounds, quest_scores

SHARES = (4, 8, 16)
QUERIES = 16


def chunkings(model: Model, scorer: Scorer) -> dict[str, Callable[[list[int]], Chunks]]:
    """Return what cuts a prompt, by name."""
    sample = [model.ids(text)[:1024] for text in (*manual()[:20], *map(source, MODULES))]
    rules = {n: scorer.rule(sample, n) for n in (4, 8)}
    found: dict[str, Callable[[list[int]], Chunks]] = {
        f"fixed {n}": lambda row, n=n: Chunks.fixed(n, len(row)) for n in (4, 8)
    }
    for n, rule in rules.items():
        found[f"content {n}"] = lambda row, rule=rule: rule(scorer([row])[0])
    hashed, rule = HashScore(2), BoundaryRule(1, min_length=1, max_length=8)
    found["hash"] = lambda row: rule(hashed(torch.tensor(row)))
    return found


def missed(q: Tensor, k: Tensor, chunks: Chunks) -> dict[tuple[str, int], float]:
    """Return the attention not read by queries [Q, M, D] of one KV head's keys [T, 1, D]."""
    far = int((chunks.ends <= len(k) - WINDOW).sum())
    lengths, ends = chunks.lengths[:far], chunks.ends[:far]
    end = int(ends[-1])
    costs = ends.clamp(min=FIRST) - chunks.starts[:far].clamp(min=FIRST)
    weights = (q @ k[:, 0].T * q.shape[2] ** -0.5).softmax(-1).flatten(0, 1)
    weights[:, :FIRST] = 0
    weights = weights[:, :end]
    of_chunk = torch.segment_reduce(weights.T.contiguous(), "sum", lengths=lengths, axis=0).T
    boxes = chunk_bounds(k[:end], lengths)
    queries = q.flatten(0, 1)
    scores = {
        "bound": quest_scores(queries, *boxes, normalise=False),
        "estimate": quest_scores(queries, *boxes),
        "exact": of_chunk / lengths,
    }
    found, total = {}, weights.sum(1)
    for share in SHARES:
        budget = (end - FIRST) // share
        best = weights.topk(budget, -1).values.sum(1)
        found["tokens", share] = float((total - best).mean())
        for name, of_score in scores.items():
            order, tokens = best_within(of_score, costs, budget)
            read = (of_chunk.gather(1, order) * (tokens <= budget)).sum(1)
            found[name, share] = float((total - read).mean())
    return found


def of_prompt(batch: Batch, chunks: Chunks) -> dict[tuple[str, int], float]:
    """Return the means over layers and heads."""
    found = defaultdict(list)
    for q, k, _ in batch.projections[::2]:
        group = q.shape[1] // k.shape[1]
        for g in range(k.shape[1]):
            own = q[-QUERIES:, g * group : (g + 1) * group]
            for key, value in missed(own, k[:, g : g + 1], chunks).items():
                found[key].append(value)
    return {key: statistics.mean(values) for key, values in found.items()}


def main() -> None:
    options = parse(parser(__doc__), 1)
    torch.set_grad_enabled(False)
    model = Model()
    cuts = chunkings(model, Scorer(model))
    count = 2 if options.quick else 8
    values: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    lengths = defaultdict(list)
    for batch in documents(model, count, 1024, 1):
        for name, cut in cuts.items():
            chunks = cut(batch.prompts[0])
            lengths[name].append(chunks.ratio)
            for (score, share), value in of_prompt(batch, chunks).items():
                values[name, score, share].append(value)
    rows = [
        {"chunks": name, "length": statistics.mean(lengths[name]), "score": score}
        | {f"1/{share}": f"{statistics.mean(values[name, score, share]):.4f}" for share in SHARES}
        for name in cuts
        for score in ("bound", "estimate", "exact", "tokens")
    ]
    show("attention that is not read", rows, {"documents": count}, options.json)


if __name__ == "__main__":
    main()
