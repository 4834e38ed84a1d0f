"""dynchunk.attend and a wrapped nn.MultiheadAttention, beside torch's own."""

import pytest
import torch
from torch import nn

import dynchunk
from dynchunk import BoundaryRule, FixedStride, KeyChangeScore
from dynchunk.attention import Evict, Hash, MeanPool, Midpoints, Policy, Quest, Raw, full
from dynchunk.attention.scoring import Segmenter
from dynchunk.attention.specs import AsScored
from dynchunk.cache import Cache

RULE = BoundaryRule(1, max_length=5)
POOLED = {"reduction": MeanPool(), "window": 6, "cover": "tail", "rope": None, "sink": False}
POLICIES = {
    "full": full(rope=None),
    "fixed": Policy(FixedStride(3), **POOLED),
    "hash": Policy(RULE, Hash(2), views=(AsScored(), Midpoints()), **POOLED),
    "quest": Policy(RULE, Hash(2), selection=Quest(0.5), **POOLED | {"reduction": Raw()}),
    "evict": Policy(RULE, Hash(2), **POOLED | {"reduction": Evict(observe=4)}),
}


def operands(batch=2, tokens=33, kv_heads=2):
    torch.manual_seed(0)
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, 6))
    return [torch.randn(batch, heads, tokens, d, dtype=torch.float64) for heads, d in shapes]


def ids(batch=2, tokens=33):
    return torch.randint(40, (batch, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scale", [None, 0.2])
def test_full_attention_is_sdpa(scale):
    q, k, v = operands()
    expected = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=scale
    )
    found = dynchunk.attend(q, k, v, POLICIES["full"], scale=scale)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", POLICIES)
def test_rows_with_padding_are_the_cache_alone(name):
    q, k, v = operands()
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[0, :7] = False
    poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k, v)]
    out = dynchunk.attend(*poisoned, POLICIES[name], tokens=ids(), mask=mask)
    for b in range(2):
        cache = Cache(POLICIES[name])
        real = mask[b]
        if isinstance(POLICIES[name].boundaries, BoundaryRule):
            cache.begin(torch.tensor([0, int(real.sum())]))
            segmenter = Segmenter(POLICIES[name], 1)
            cache.segment(0, segmenter, ids()[b, real], torch.zeros(int(real.sum()), 0))
        else:
            cache.append(int(real.sum()))
        rows = [x[b][:, real].transpose(0, 1) for x in (q, k, v)]
        expected = cache.layers[0].mix(*rows)
        torch.testing.assert_close(out[b][:, real].transpose(0, 1), expected)
    assert not out[0, :, :7].any()


@pytest.mark.parametrize("name", ["full", "fixed", "hash"])
def test_gradients(name):
    q, k, v = (x[..., :12, :].requires_grad_() for x in operands())
    tokens = ids()[:, :12]

    def function(q, k, v):
        return dynchunk.attend(q, k, v, POLICIES[name], tokens=tokens)

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)


def test_errors():
    q, k, v = operands()
    with pytest.raises(ValueError, match="tokens: expected what the policy's boundaries follow"):
        dynchunk.attend(q, k, v, POLICIES["hash"])
    with pytest.raises(ValueError, match="scores: expected what the policy's boundaries follow"):
        dynchunk.attend(q, k, v, Policy(RULE, **POOLED))
    with pytest.raises(ValueError, match="k: expected 2 sequences of 33 tokens"):
        dynchunk.attend(q, k[:, :, :5], v, POLICIES["full"])
    with pytest.raises(ValueError, match="which have no weights"):
        dynchunk.attend(q, k, v, Policy(FixedStride(4)))
    with pytest.raises(ValueError, match=r"no gradient \(torch.no_grad\(\)\) with Evict"):
        dynchunk.attend(q.requires_grad_(), k, v, POLICIES["evict"], tokens=ids())


# nn.MultiheadAttention


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 4, batch_first=True)


def causal(tokens):
    return nn.Transformer.generate_square_subsequent_mask(tokens)


def test_a_wrapped_module_that_keeps_everything_is_the_module(module):
    x = torch.randn(3, 11, 16)
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[1, 7:] = True
    expected, _ = module(
        x, x, x, attn_mask=causal(11), key_padding_mask=padding, need_weights=False
    )
    state = {name: x.clone() for name, x in module.state_dict().items()}
    assert dynchunk.wrap(module, full()) is module
    found, weights = module(x, x, x, key_padding_mask=padding, is_causal=True)
    torch.testing.assert_close(found[~padding], expected[~padding])
    assert weights is None
    y = x[0]
    one, _ = module(y, y, y, is_causal=True)
    torch.testing.assert_close(one, expected[0])
    assert dynchunk.unwrap(module) is module
    assert type(module) is nn.MultiheadAttention
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    again, _ = module(x, x, x, attn_mask=causal(11), key_padding_mask=padding, need_weights=False)
    assert torch.equal(again, expected)


def test_a_wrapped_module_follows_its_policy_inside_an_encoder():
    """Also past the fast path that nn.TransformerEncoderLayer has in evaluation mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 30, 16)
    with torch.no_grad():
        expected = layer(x, causal(30), is_causal=True)
        dynchunk.wrap(layer.self_attn, Policy(FixedStride(4), **POOLED))
        pooled = layer(x, causal(30), is_causal=True)
    torch.testing.assert_close(pooled[:, :6], expected[:, :6])  # all of it raw
    assert not torch.allclose(pooled[:, 20:], expected[:, 20:], atol=1e-3)


def test_boundaries_that_follow_the_inputs(module):
    policy, score = Policy(RULE, **POOLED), KeyChangeScore(0)
    dynchunk.wrap(module, policy, score=score)
    x = torch.randn(1, 20, 16)
    out, _ = module(x, x, x, is_causal=True)
    heads = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = heads.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    expected = dynchunk.attend(q, k, v, policy, scores=score(x[0])[None])
    torch.testing.assert_close(out, module.out_proj(expected.transpose(1, 2).flatten(2)))
    out.sum().backward()
    assert module.in_proj_weight.grad.any()


def test_module_errors(module):
    x, y = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    with pytest.raises(TypeError, match="policy: expected a Policy for this module"):
        dynchunk.wrap(module)
    with pytest.raises(ValueError, match="the module does not see the ids"):
        dynchunk.wrap(module, POLICIES["hash"])
    with pytest.raises(ValueError, match="score: expected a Score of the module's inputs"):
        dynchunk.wrap(module, Policy(RULE, **POOLED))
    dynchunk.wrap(module, full())
    with pytest.raises(ValueError, match="expected the query itself"):
        module(x, y, y, is_causal=True)
    with pytest.raises(ValueError, match="is_causal: expected True"):
        module(x, x, x)
    with pytest.raises(ValueError, match="no add_zero_attn"):
        dynchunk.wrap(nn.MultiheadAttention(16, 4, add_zero_attn=True), full())
