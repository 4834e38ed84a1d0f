"""Scores of chunks for a selection, beside the logits of their tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import few, normal

from dynchunk.attention import All, Evict, MeanPool, Policy, Quest, Raw, TopK, quest
from dynchunk.boundaries import BoundaryRule, FixedStride
from dynchunk.ops.budget import best_within
from dynchunk.selection import chunk_bounds, quest_scores


def logits(q, k, scale):
    """[H, T] of query heads over the keys of their KV heads."""
    group = q.shape[0] // k.shape[1]
    return torch.stack([scale * k[:, h // group] @ q[h] for h in range(len(q))])


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_the_bound_bounds_and_the_estimate_is_below_it(lengths, seed):
    lengths = torch.tensor(lengths)
    k, q = normal(int(lengths.sum()), 2, 6, seed=seed), normal(6, 6, seed=seed + 1)
    low, high = chunk_bounds(k, lengths)
    bound = quest_scores(q, low, high, normalise=False)
    estimate = quest_scores(q, low, high)
    highest = torch.stack([x.amax(1) for x in logits(q, k, 6**-0.5).split(lengths.tolist(), 1)], 1)
    assert (bound >= highest - 1e-12).all()
    assert (estimate <= bound + 1e-12).all()
    single = lengths == 1
    torch.testing.assert_close(estimate[:, single], highest[:, single])
    torch.testing.assert_close(bound[:, single], highest[:, single])


def test_the_estimate_does_not_grow_with_the_length_as_the_bound_does():
    """Chunks of one distribution, short and long: the mean gap to the highest logit."""
    lengths = torch.tensor([2] * 200 + [16] * 200)
    k, q = normal(int(lengths.sum()), 1, 64), normal(1, 64, seed=1)
    boxes = chunk_bounds(k, lengths)
    highest = torch.stack([x.amax(1) for x in logits(q, k, 1 / 8).split(lengths.tolist(), 1)], 1)
    gaps = [
        (quest_scores(q, *boxes, normalise=normalise) - highest)[0].split(200)
        for normalise in (False, True)
    ]
    bound, estimate = ([float(x.mean()) for x in pair] for pair in gaps)
    assert bound[1] - bound[0] > 5  # the long ones win whatever they hold
    assert abs(estimate[1] - estimate[0]) < 0.5


def test_16_bits_and_the_scale():
    k, q = normal(12, 2, 8), normal(4, 8, seed=1)
    lengths = torch.tensor([5, 7])
    expected = quest_scores(q, *chunk_bounds(k, lengths), scale=0.3)
    half = quest_scores(q.bfloat16(), *chunk_bounds(k.bfloat16(), lengths), scale=0.3)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), expected, rtol=0.02, atol=0.05)
    torch.testing.assert_close(quest_scores(q, *chunk_bounds(k, lengths)) * 8**0.5 * 0.3, expected)


def test_shapes_are_verified():
    low = torch.zeros(3, 2, 4)
    for q in (torch.zeros(3, 4), torch.zeros(2, 5), torch.zeros(2, 2, 4)):
        with pytest.raises(ValueError, match=r"q: expected \[H, D\] for low and high"):
            quest_scores(q, low, low)


# Budgets


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(0, 30),
)
def test_the_best_chunks_that_fit_in_one_order(chunks, budget):
    scores = torch.tensor([float(s) for s, _ in chunks])
    lengths = torch.tensor([n for _, n in chunks])
    order, total = best_within(torch.stack([scores, -scores]), lengths, budget)
    for sign, own, sums in zip((1, -1), order.tolist(), total.tolist(), strict=True):
        assert own == sorted(range(len(chunks)), key=lambda i: (-sign * chunks[i][0], i))
        assert sums == torch.tensor([chunks[i][1] for i in own]).cumsum(0).tolist()


def test_a_budget_in_tokens_or_as_a_share():
    assert Quest(0.25).budget(10) == 2
    assert Quest(1.0).budget(10) == 10
    assert Quest(None, 7).budget(10) == 7
    assert Quest(None, 7).budget(3) == 3
    with pytest.raises(ValueError, match="share, k: expected one of them, the other None"):
        Quest(0.5, 3)
    with pytest.raises(ValueError, match=r"share: expected a number in \(0, 1\]"):
        Quest(0.0)


# Policies


def test_policies_of_raw_chunks_survive_json():
    for policy in (quest(FixedStride(4)), quest(BoundaryRule(1), share=0.5, window=9)):
        assert Policy.from_dict(policy.as_dict()) == policy
        assert "Quest" in repr(policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": MeanPool()}, r"reduction: expected Raw\(\) with Quest, got 'MeanPool'"),
        ({"selection": TopK(3)}, "selection: expected All or Quest with Raw"),
        ({"cover": "window"}, "cover: expected 'tail' with Raw"),
        ({"window": None}, "window: expected an integer >= 0 with Raw"),
        ({"boundaries": None}, "boundaries: expected a rule with Raw"),
        ({"reduction": Evict()}, r"reduction: expected Raw\(\) with Quest"),
        ({"reduction": Evict(), "selection": TopK(2)}, "selection: expected All with Evict"),
        ({"reduction": Evict(), "selection": All(), "cover": "window"}, "cover: expected 'tail'"),
    ],
)
def test_what_does_not_go_together(change, message):
    whole = {"reduction": Raw(), "selection": Quest(), "cover": "tail", "window": 8}
    with pytest.raises(ValueError, match=message):
        Policy(**({"boundaries": FixedStride(4)} | whole | change))


def test_modules_with_weights_say_where_such_policies_go():
    from dynchunk.attention import ChunkedAttention, Layout
    from dynchunk.chunks import Chunks

    with pytest.raises(ValueError, match=r"one that pools \(LayerCache.mix is for this one\)"):
        ChunkedAttention(quest(FixedStride(4)), 8, 2, 2)
    with pytest.raises(ValueError, match=r"one that pools \(a Cache is for this one\)"):
        Layout.of(quest(FixedStride(4)), Chunks.fixed(4, 9))
