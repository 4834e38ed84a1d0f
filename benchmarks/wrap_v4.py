"""DeepSeek V4 with ``dynchunk.wrap`` and without: ``python benchmarks/wrap_v4.py [--json]``.

A model of transformers with four small layers of all three types takes a prompt and fills a cache.
Each run has a process of its own; memory is the process's peak, and how far the prompt raises it.
transformers' own attention is measured up to ``--limit`` tokens; beyond, the polynomial of degree
two through what was measured says what it would take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import torch
from common import parse, parser, show
from memory import held_bytes, peak_bytes

DECODED = 16
WHO = ("ours", "theirs")


def tiny():
    """Return a random model; its strides and windows are V4's, its widths are not."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = ("sliding", "heavily_compressed", "compressed_sparse", "heavily_compressed")
    config = DeepseekV4Config(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=[f"{kind}_attention" for kind in kinds],
        mlp_layer_types=["moe"] * len(kinds),
        index_n_heads=8,
        index_head_dim=16,
        partial_rotary_factor=0.25,
    )
    return DeepseekV4ForCausalLM(config).eval()


@torch.no_grad()
def child(who: str, tokens: str) -> None:
    """Take a short prompt, for which all is compiled, then the long one, then some tokens more."""
    import dynchunk

    torch.manual_seed(0)
    model = tiny()
    if who == "ours":
        dynchunk.wrap(model)
    warm = model(torch.zeros(1, 600, dtype=torch.int64), logits_to_keep=1)
    model(torch.zeros(1, 1, dtype=torch.int64), cache=warm.cache)
    del warm
    ids, before = torch.randint(256, (1, int(tokens))), peak_bytes()
    begin = time.perf_counter()
    out = model(ids, logits_to_keep=1)
    prompt, peak = time.perf_counter() - begin, peak_bytes()
    begin = time.perf_counter()
    for _ in range(DECODED):
        out = model(ids[:, :1], cache=out.cache)
    each = (time.perf_counter() - begin) / DECODED
    figures = {"peak": peak, "rise": peak - before, "prompt_s": prompt, "token_s": each}
    print(json.dumps(figures | {"held": held_bytes(out.cache)}))


def measure(who: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", who, str(tokens)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def extrapolated(measured: dict[int, float], tokens: int) -> float:
    """Return the polynomial of degree two through the three largest sizes at another one."""
    sizes = sorted(measured)[-3:]
    fit = np.polyfit(sizes, [measured[n] for n in sizes], len(sizes) - 1)
    return float(np.polyval(fit, tokens))


def row(tokens: int, found: dict[str, dict[str, float] | None], theirs_gib: float) -> dict:
    ours, theirs = found["ours"], found["theirs"]
    figures: dict[str, object] = {
        "tokens": tokens,
        "ours peak, GiB": ours["peak"] / 2**30,
        "theirs peak, GiB": theirs_gib,
        "theirs is": "extrapolated" if theirs is None else "measured",
        "ours rise, bytes per token": ours["rise"] / tokens,
        "ours prompt_s": ours["prompt_s"],
        "theirs prompt_s": theirs and theirs["prompt_s"],
        "ours token_s": ours["token_s"],
        "theirs token_s": theirs and theirs["token_s"],
        "ours held, bytes per token": ours["held"] / tokens,
        "theirs held, bytes per token": theirs and theirs["held"] / tokens,
    }
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+")
    arguments.add_argument("--limit", type=int, default=8192, help="tokens for transformers' own")
    options = parse(arguments, 1)
    sizes = options.tokens or ([512, 1024, 2048, 4096] if options.quick else SIZES)
    rows, peaks = [], {}
    for tokens in sorted(sizes):
        found: dict[str, dict[str, float] | None] = {"ours": measure("ours", tokens)}
        small = tokens <= (min(options.limit, 2048) if options.quick else options.limit)
        found["theirs"] = measure("theirs", tokens) if small else None
        if found["theirs"] is not None:
            peaks[tokens] = found["theirs"]["peak"] / 2**30
        rows.append(row(tokens, found, peaks.get(tokens) or extrapolated(peaks, tokens)))
    show("a prompt of DeepSeek V4 in small", rows, {}, options.json)


SIZES = [1024, 2048, 4096, 8192, 32768]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
