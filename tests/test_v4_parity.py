"""Our layers equal transformers' DeepSeek V4 at its fixed strides."""

import pytest
import torch

from dynchunk.attention import Layout, one_chunk_each
from dynchunk.chunks import Chunks

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)

from dynchunk.integrations.deepseek_v4 import attention_from_transformers  # noqa: E402

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TIE = 1e-6
#: (stride of CSA, stride of HCA, window, tokens)
SHAPES = [(4, 128, 128, 300), (3, 5, 16, 53), (5, 16, 16, 61), (16, 3, 128, 150)]
IDS = ["r4-r128-W128-T300", "r3-r5-W16-T53", "r5-r16-W16-T61", "r16-r3-W128-T150"]


def tiny(csa, hca, window, index_heads=8, topk=3, layers=(SLIDING, CSA, HCA), yarn=True):
    """A random model whose biases, norms and sinks all matter."""
    rope = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 32}
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=8,
        partial_rotary_factor=0.5,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=list(layers),
        mlp_layer_types=["moe"] * len(layers),
        compress_rates={CSA: csa, HCA: hca},
        sliding_window=window,
        index_n_heads=index_heads,
        index_head_dim=8,
        index_topk=topk,
        rope_parameters=rope if yarn else None,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def record(model):
    """Return what every attention layer was given and returned, call after call."""
    calls = [[] for _ in model.model.layers]
    for seen, layer in zip(calls, model.model.layers, strict=True):
        layer.self_attn.register_forward_hook(
            lambda _, args, kwargs, out, seen=seen: seen.append(
                (args[0] if args else kwargs["hidden_states"], out[0])
            ),
            with_kwargs=True,
        )
    return calls


def chunks_of(policy, tokens):
    if policy.boundaries is None:
        return one_chunk_each(tokens)
    return Chunks.fixed(policy.boundaries.stride, tokens)


@torch.no_grad()
def run_ours(attention, x, last=None):
    """Mix hidden states [T, dim]; return the outputs of all tokens, or of the ``last`` ones."""
    layout = Layout.of(
        attention.policy,
        chunks_of(attention.policy, len(x)),
        cu_seqlens_q=None if last is None else [0, last],
    )
    return attention(x, layout).out


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_every_attention_layer_equals_theirs_in_a_prefill(shape):
    *sizes, tokens = shape
    model = tiny(*sizes)
    calls = record(model)
    with torch.no_grad():
        model(torch.randint(64, (1, tokens)), use_cache=False)
    for layer, seen in zip(model.model.layers, calls, strict=True):
        x, out = seen[0]
        ours = run_ours(attention_from_transformers(layer.self_attn), x[0])
        torch.testing.assert_close(ours, out[0], **CLOSE)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=IDS[:3])
def test_every_attention_layer_equals_theirs_token_by_token(shape):
    *sizes, tokens = shape
    prompt = tokens - 40
    model = tiny(*sizes)
    calls = record(model)
    ids = torch.randint(64, (1, tokens))
    with torch.no_grad():
        cache = model(ids[:, :prompt], use_cache=True).past_key_values
        for t in range(prompt, tokens):
            cache = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).past_key_values
    for layer, seen in zip(model.model.layers, calls, strict=True):
        attention = attention_from_transformers(layer.self_attn)
        x = torch.cat([given[0] for given, _ in seen])
        for t in range(prompt, tokens):
            ours = run_ours(attention, x[: t + 1], last=1)
            torch.testing.assert_close(ours, seen[t - prompt + 1][1][0], **CLOSE)
        torch.testing.assert_close(run_ours(attention, x[:prompt]), seen[0][1][0], **CLOSE)
