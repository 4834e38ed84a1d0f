"""ChunkedAttention on every policy: a loop in float64, causality, packing, gradients."""

from itertools import pairwise

import attention_oracle as oracle
import pytest
import torch
from attention_oracle import HEADS, POLICIES
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close, layouts, normal

from dynchunk.attention import (
    ChunkedAttention,
    Layout,
    MeanPool,
    Policy,
    Rope,
    chunk_attention,
    one_chunk_each,
)
from dynchunk.attention.specs import Rescored
from dynchunk.boundaries import FixedStride
from dynchunk.chunks import Chunks

few = settings(max_examples=max(settings.default.max_examples // 20, 1), deadline=None)
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
heads_kinds = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


def build(policy, heads=HEADS["shared"], dtype=torch.float64, slopes=True, dim=8):
    n, kv, shared = heads
    layer = ChunkedAttention(policy, dim, n, kv, 8, shared_kv=shared, slopes=slopes)
    return oracle.randomise(layer).to(dtype)


def chunks_for(policy, cu, seed=0):
    """Random chunks for each score of a policy, or none for one without boundaries."""
    if policy.boundaries is None:
        return one_chunk_each(cu)
    n = 1 + sum(isinstance(view, Rescored) for view in policy.views)
    generator = torch.Generator().manual_seed(seed)
    total = cu if isinstance(cu, int) else cu[-1]
    scored = [
        Chunks.from_boundaries(torch.rand(total, generator=generator) < 0.3, cu) for _ in range(n)
    ]
    return scored[0] if n == 1 else scored


def expected(layer, x, layout):
    mean = isinstance(layer.policy.reduction, MeanPool) and layer.policy.reduction.log_length
    bias = oracle.log_lengths(layout.views) if mean else None
    return oracle.attention(layer, x, layout.views, bias)


@policies
@heads_kinds
def test_equals_a_loop_in_float64(policy, heads):
    layer, x = build(policy, heads), normal(13, 8)
    layout = Layout.of(policy, chunks_for(policy, [0, 9, 9, 13]))
    assert_close(layer(x, layout).out, expected(layer, x, layout))


@few
@given(st.data(), st.sampled_from([name for name in POLICIES if name != "hash-rescored"]))
def test_equals_a_loop_on_any_chunks(data, name):
    policy = POLICIES[name]
    chunks = data.draw(layouts(max_tokens=9).filter(lambda chunks: chunks.num_tokens))
    if policy.boundaries is None:
        chunks = one_chunk_each(chunks.cu_seqlens)
    layer, x = build(policy), normal(chunks.num_tokens, 8, seed=data.draw(st.integers(0, 9)))
    layout = Layout.of(policy, chunks)
    assert_close(layer(x, layout).out, expected(layer, x, layout))


@policies
@heads_kinds
def test_no_tokens_give_no_output(policy, heads):
    layer = build(policy, heads)
    assert layer(normal(0, 8), chunks_for(policy, [0, 0])).out.shape == (0, 8)


@policies
def test_float32_is_close_to_float64(policy):
    layer, x = build(policy), normal(20, 8)
    layout = Layout.of(policy, chunks_for(policy, [0, 12, 20]))
    out = layer(x, layout).out
    assert_close(layer.float()(x.float(), layout).out, out.detach())


@policies
def test_bfloat16_is_near_float32_at_far_positions(policy):
    # 300 tokens: more than bfloat16 counts, so that slopes must not be rounded to it.
    layer, x = build(policy, dtype=torch.bfloat16), normal(300, 8, dtype=torch.bfloat16)
    layout = Layout.of(policy, chunks_for(policy, [0, 300]))
    out = layer(x, layout).out
    assert out.dtype == torch.bfloat16
    expected = layer.float()(x.float(), layout).out.detach()
    if layer.indexer is None:  # rounding changes what an indexer chooses
        assert (out.float() - expected).norm() < 2e-2 * expected.norm()


@policies
def test_case_20_no_future_token_changes_a_past_output(policy):
    layer, x, total = build(policy), normal(14, 8), 14
    layout = Layout.of(policy, chunks_for(policy, total))
    before = layer(x, layout).out
    for j in range(total):
        changed = x.clone()
        changed[j] += 10.0
        after = layer(changed, layout).out
        assert torch.equal(after[:j], before[:j])
        assert not torch.equal(after[j], before[j])


@policies
def test_case_19_packed_documents_do_not_leak(policy):
    r = 3
    cu = [0, 1, r, 2 * r + 1, 2 * r + 1, 17]
    layer, x = build(policy), normal(17, 8)
    layout = Layout.of(policy, chunks_for(policy, cu))
    before = layer(x, layout).out
    for begin, end in pairwise(cu):
        changed = x.clone()
        changed[begin:end] = normal(end - begin, 8, seed=9)
        after = layer(changed, layout).out
        others = torch.ones(17, dtype=torch.bool)
        others[begin:end] = False
        assert torch.equal(after[others], before[others])


@policies
def test_a_packed_document_equals_itself_alone(policy):
    layer, x = build(policy), normal(17, 8)
    scored = chunks_for(policy, [0, 6, 6, 17])
    packed = layer(x, scored).out
    many = [scored] if isinstance(scored, Chunks) else scored
    for b, rows in ((0, slice(0, 6)), (2, slice(6, 17))):
        alone = [one.sequence(b) for one in many]
        assert_close(layer(x[rows], alone).out, packed[rows].detach())


@policies
def test_the_last_tokens_as_queries_equal_the_whole(policy):
    layer, x = build(policy), normal(16, 8)
    chunks = chunks_for(policy, [0, 7, 16])
    whole = layer(x, Layout.of(policy, chunks)).out
    for last in ([0, 1, 2], [0, 0, 9], [0, 7, 8]):
        layout = Layout.of(policy, chunks, cu_seqlens_q=last)
        rows = [*range(7 - last[1], 7), *range(16 - (last[2] - last[1]), 16)]
        assert_close(layer(x, layout).out, whole[rows].detach())


@policies
@heads_kinds
def test_every_parameter_gets_a_gradient(policy, heads):
    layer, x = build(policy, heads), normal(24, 8)
    mixed = layer(x, chunks_for(policy, 24))
    loss = mixed.out.square().sum()
    (loss if mixed.index_loss is None else loss + mixed.index_loss).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_gradients_equal_differences():
    policy = POLICIES["fixed-staggered"]
    layer, x = build(policy), normal(7, 8, grad=True)
    layout = Layout.of(policy, Chunks.fixed(4, 7))
    assert torch.autograd.gradcheck(lambda x: layer(x, layout).out, (x,))


@pytest.mark.parametrize("stride", [3, 5])
def test_case_15_a_row_alone_equals_the_same_row_among_eight_at_odd_strides(stride):
    policy = Policy(FixedStride(stride), window=stride)
    layer, x = build(policy, dtype=torch.float32), normal(8, 11, 8, dtype=torch.float32)
    together = layer(x.flatten(0, 1), Chunks.fixed(stride, list(range(0, 89, 11)))).out
    for row, out in zip(x, together.unflatten(0, (8, 11)), strict=True):
        assert_close(layer(row, Chunks.fixed(stride, 11)).out, out.detach().double())


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
def test_case_17_moving_all_positions_changes_no_score(theta):
    # Far tokens that no query reads move the positions; entries are rotated at their chunk's start.
    policy = Policy(FixedStride(4), window=4, rope=Rope(0.5, theta), sink=False)
    q, k = normal(12, 2, 8), normal(12, 1, 8)
    layout = Layout.of(policy, Chunks.fixed(4, 12))
    moved = Layout(
        layout.views,
        layout.reads,
        layout.spans,
        None,
        layout.query_position + 1000,
        layout.position + 1000,
        tuple(at + 1000 for at in layout.entry_position),
        None,
    )
    here, there = (chunk_attention(q, k, None, policy, one) for one in (layout, moved))
    torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-11)
    # Had the entries not been rotated, moving them alone would change nothing.
    unmoved = chunk_attention(
        q, k, None, policy, Layout(*[*vars(moved).values()][:6], layout.entry_position, None)
    )
    assert (unmoved[4:] - here[4:]).abs().max() > 1e-3


def test_equal_content_gives_equal_entries_wherever_it_lies():
    policy = POLICIES["overlap"]
    layer, content = build(policy), normal(10, 8)
    cuts = [2, 5, 7]
    for prefix in range(5):
        x = torch.cat([normal(prefix, 8, seed=5), content])
        chunks = Chunks.from_boundaries([prefix + cut for cut in cuts], prefix + 10)
        (entries,) = layer.compress_k(x, Layout.of(policy, chunks))
        found = entries[chunks.is_closed][-2:]  # one whose chunk before is whole, too
        if prefix == 0:
            first = found
        assert torch.equal(found[-1], first[-1])


def test_functional_attention_equals_the_module_without_weights():
    policy = POLICIES["mean"]
    layer, x = build(policy), normal(13, 8)
    layout = Layout.of(policy, Chunks.fixed(3, 13))
    q = layer.q_norm(layer.q_proj(x).unflatten(-1, (2, 8)))
    k = layer.k_norm(layer.k_proj(x).unflatten(-1, (1, 8)))
    out = chunk_attention(q, k, None, policy, layout, sink=layer.sink, slopes=layer.slopes)
    assert_close(layer.o_proj(out.flatten(1)), layer(x, layout).out.detach())


def test_views_split_channels_at_equal_bytes():
    one, two = build(POLICIES["fixed"]), build(POLICIES["fixed-staggered"])
    assert (two.heads, two.kv_heads, two.head_dim) == (4, 2, 4)
    assert two.k_proj.weight.shape == one.k_proj.weight.shape


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(POLICIES["fixed"], (3, 2, False)), "heads: expected a multiple of kv_heads"),
        (
            lambda: ChunkedAttention(POLICIES["fixed-staggered"], 6, 2, 1),
            "head_dim: expected a multiple of 2 views",
        ),
        (
            lambda: build(POLICIES["fixed"])(normal(5, 8), Chunks.fixed(3, 6)),
            "x: expected hidden states of 6 tokens",
        ),
        (
            lambda: Layout.of(POLICIES["hash-rescored"], Chunks.fixed(3, 6)),
            "chunks: expected 2 Chunks: 1 views are on another score",
        ),
        (
            lambda: chunk_attention(
                *[normal(6, 1, 8)] * 2, None, POLICIES["overlap"], Chunks.fixed(3, 6)
            ),
            "policy: expected a policy without overlap",
        ),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()
