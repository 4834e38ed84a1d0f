"""Our layers equal transformers' DeepSeek V4 at its fixed strides."""

import copy

import pytest
import torch
from v4_models import CSA, HCA, SLIDING, tiny

from dynchunk.attention import Layout, csa, hca, one_chunk_each, sliding
from dynchunk.attention.rope import rotate
from dynchunk.boundaries import BoundaryRule
from dynchunk.chunks import Chunks

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)


from dynchunk.integrations.deepseek_v4 import (  # noqa: E402
    attention_from_transformers,
    policy_of,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TIE = 1e-6
V4_YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
#: (stride of CSA, stride of HCA, window, tokens)
SHAPES = [(4, 128, 128, 300), (3, 5, 16, 53), (5, 16, 16, 61), (16, 3, 128, 150)]
IDS = ["r4-r128-W128-T300", "r3-r5-W16-T53", "r5-r16-W16-T61", "r16-r3-W128-T150"]


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


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_every_attention_layer_equals_theirs_token_by_token(shape):
    *sizes, tokens = shape
    prompt = tokens - 40
    model = tiny(*sizes)
    calls = record(model)
    ids = torch.randint(64, (1, tokens))
    with torch.no_grad():
        cache = model(ids[:, :prompt], use_cache=True).past_key_values
        for t in range(prompt, tokens):
            cache = model(ids[:, t : t + 1], cache=cache, use_cache=True).past_key_values
    for layer, seen in zip(model.model.layers, calls, strict=True):
        attention = attention_from_transformers(layer.self_attn)
        x = torch.cat([given[0] for given, _ in seen])
        for t in range(prompt, tokens):
            ours = run_ours(attention, x[: t + 1], last=1)
            torch.testing.assert_close(ours, seen[t - prompt + 1][1][0], **CLOSE)
        torch.testing.assert_close(run_ours(attention, x[:prompt]), seen[0][1][0], **CLOSE)


def closed_entries(compressor, x, attention):
    """Our entries of hidden states [T, dim], rotated."""
    layout = Layout.of(attention.policy, chunks_of(attention.policy, len(x)))
    (entries,) = compressor(x, layout)
    rope = attention.policy.rope
    if compressor is not attention.compressor:
        rope = attention.indexer.rope
    rotated = rotate(entries[:, 0], layout.entry_position[0], rope)
    return rotated[layout.views[0].is_closed]


@pytest.mark.parametrize("kind", [CSA, HCA])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@torch.no_grad()
def test_compressors_equal_theirs(shape, kind):
    *sizes, tokens = shape
    theirs = tiny(*sizes, layers=[kind]).model.layers[0].self_attn
    ours, x = attention_from_transformers(theirs), torch.randn(1, tokens, 32)
    at = torch.arange(tokens)[None]
    entries, _ = theirs.compressor(x, theirs.q_a_norm(theirs.q_a_proj(x)), at, None, 0)
    torch.testing.assert_close(closed_entries(ours.compressor, x[0], ours), entries[0, 0], **CLOSE)


def index_scores(theirs, x):
    """Scores [T, N] of transformers' indexer and the entries it chose [T, K]."""
    seen = []
    hook = theirs.scorer.register_forward_hook(lambda _, args, out: seen.append(out))
    at = torch.arange(x.shape[1])[None]
    chosen = theirs(x, x[..., :24], at, None, 0)
    hook.remove()
    return seen[0][0], chosen[0]


def assert_same_choice(scores, theirs, ours):
    """Compare the entries chosen for one query, except where scores tie at the border."""
    theirs, ours = set(theirs.tolist()) - {-1}, set(ours.tolist()) - {-1}
    assert len(theirs) == len(ours)
    if theirs == ours:
        return False
    border = scores[list(theirs)].min()
    assert all(abs(scores[i] - border) < TIE for i in theirs ^ ours)
    return True


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("stride", [3, 4, 5, 16])
@torch.no_grad()
def test_the_indexer_chooses_the_same_entries_but_for_ties(stride, heads):
    tokens = 25 * stride // 2
    layer = tiny(stride, 8, 16, index_heads=heads, layers=[CSA]).model.layers[0].self_attn
    attention, x = attention_from_transformers(layer), torch.randn(1, tokens, 32)
    scores, chosen = index_scores(layer.compressor.indexer, x)
    layout = Layout.of(attention.policy, Chunks.fixed(stride, tokens))
    ours = attention.indexer(x[0], x[0, :, :24], layout)
    ties = [assert_same_choice(*row) for row in zip(scores, chosen, ours.indices[0], strict=True)]
    assert any(ties) == (heads == 1) or 1 < heads < 8
    for t, (best, indices) in enumerate(zip(ours.scores[0], ours.indices[0], strict=True)):
        real = indices >= 0
        torch.testing.assert_close(best[real], scores[t, indices[real]], **CLOSE)


@pytest.mark.parametrize("heads", [1, 2, 4])
@torch.no_grad()
def test_case_32_a_layer_with_few_index_heads_equals_theirs_but_for_ties(heads):
    model = tiny(3, 8, 16, index_heads=heads, layers=[CSA])
    calls = record(model)
    model(torch.randint(64, (1, 80)), use_cache=False)
    layer = model.model.layers[0].self_attn
    attention, (x, out) = attention_from_transformers(layer), calls[0][0]
    low_rank = layer.q_a_norm(layer.q_a_proj(x))
    theirs = layer.compressor.indexer(x, low_rank, torch.arange(80)[None], None, 0)[0]
    layout = Layout.of(attention.policy, Chunks.fixed(3, 80))
    ours = attention.indexer(x[0], low_rank[0], layout).indices[0]
    same = [set(a.tolist()) == set(b.tolist()) for a, b in zip(theirs, ours, strict=True)]
    assert sum(same) > 30
    whole = attention(x[0], layout).out
    torch.testing.assert_close(whole[same], out[0, same], **CLOSE)
    # Ours has one order of ties: however the prompt is cut, a query reads the same entries.
    for length in range(1, 80, 7):
        part = Layout.of(attention.policy, Chunks.fixed(3, length))
        again = attention.indexer(x[0, :length], low_rank[0, :length], part).indices[0]
        assert torch.equal(again, ours[:length])


def test_policies_are_those_of_the_config():
    config = transformers.DeepseekV4Config(num_hidden_layers=4, rope_parameters=V4_YARN)
    kinds = {kind: policy_of(config, i) for i, kind in enumerate(config.layer_types)}
    assert kinds == {CSA: csa(), HCA: hca()}
    config = transformers.DeepseekV4Config(num_hidden_layers=1, layer_types=[SLIDING])
    assert policy_of(config, 0) == sliding()


def test_every_parameter_gets_a_gradient_and_content_chunks_work():
    layer = tiny(3, 5, 16, layers=[CSA]).model.layers[0].self_attn
    attention, x = attention_from_transformers(layer), torch.randn(40, 32)
    chunks = BoundaryRule(1, max_length=8)(torch.rand(40))
    mixed = attention(x, chunks)
    (mixed.out.square().sum() + mixed.index_loss).backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    for j in (5, 20, 39):
        changed = x.clone()
        changed[j] += 1
        assert torch.equal(attention(changed, chunks).out[:j], mixed.out[:j])


def test_other_modules_and_settings_are_refused():
    with pytest.raises(TypeError, match="attention: expected a DeepseekV4Attention"):
        attention_from_transformers(torch.nn.Linear(2, 2))
    config = tiny(4, 8, 16).config
    for change, message in (
        ({"rope_type": "linear"}, "rope_type: expected one of 'default', 'yarn'"),
        ({"attention_factor": 1.2}, "attention_factor: expected 1.0"),
        ({"truncate": False}, "truncate: expected True"),
    ):
        other = copy.deepcopy(config)
        other.rope_parameters["compress"].update(change)
        with pytest.raises(ValueError, match=message):
            policy_of(other, 1)
    config.layer_types = ["full_attention"]
    with pytest.raises(ValueError, match=r"layer_types\[0\]: expected one of 'sliding_attention'"):
        policy_of(config, 0)
