"""Tiny random models of the families that can be wrapped; two layers, nothing downloaded."""

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)

VOCAB = 64
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.4,  # logits far apart, so that equal texts mean something
}
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

#: Family: class of the model and what its config has beside the sizes.
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-hybrid": (
        "Qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, **_HYBRID},
    ),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma": ("Gemma", {}),
    "gemma3_text": ("Gemma3", {"query_pre_attn_scalar": 6, **_HYBRID}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "gpt_oss": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, **_HYBRID}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.3}),
}


def build(family, seed=0, **options):
    """Return a random model in evaluation mode."""
    name, extra = FAMILIES[family]
    kind = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**{**_SIZES, **extra, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sinks and norms too, which start as constants
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def batch(lengths, seed=0, left=True):
    """Return ids and mask of rows of these lengths, padded to the longest."""
    width = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for b, n in enumerate(lengths):
        mask[b, : width - n] = 0
        if not left:
            mask[b] = mask[b].flip(0)
    return ids.masked_fill(mask == 0, 0), mask


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)
