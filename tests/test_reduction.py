"""Keep or evict: scores and choices, beside loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import few, normal

from dynchunk.attention import Evict, Policy, chunk_kv
from dynchunk.boundaries import FixedStride
from dynchunk.reduction import chunks_to_keep, observed_attention


def attention_by_loops(q, k, sink, scale):
    Q, M, _ = q.shape
    total = torch.zeros(len(k), dtype=torch.float64)
    for i in range(Q):
        for m in range(M):
            seen = len(k) - Q + i + 1
            weights = torch.exp(scale * k[:seen] @ q[i, m])
            rest = 0 if sink is None else torch.exp(sink[m])
            total[:seen] += weights / (weights.sum() + rest)
    return total


@few
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.booleans(), st.integers(0, 99))
def test_attention_of_the_last_queries(Q, M, before, with_sink, seed):
    q, k = normal(Q, M, 4, seed=seed), normal(before + Q, 4, seed=seed + 1)
    sink = normal(M, seed=seed + 2) if with_sink else None
    found = observed_attention(q, k, sink=sink, scale=0.7)
    torch.testing.assert_close(found, attention_by_loops(q, k, sink, 0.7), rtol=1e-12, atol=1e-12)
    if not with_sink:
        torch.testing.assert_close(float(found.sum()), float(Q * M))


def test_large_logits_and_16_bits():
    q, k = 100 * normal(3, 2, 8), 100 * normal(9, 8, seed=1)
    found = observed_attention(q, k)
    assert found.isfinite().all()
    half = observed_attention(q.half() / 100, k.half() / 100)
    assert half.dtype == torch.float32
    torch.testing.assert_close(
        half.double(), observed_attention(q / 100, k / 100), rtol=0.01, atol=0.01
    )
    with pytest.raises(ValueError, match=r"q: expected \[Q, M, D\] for k \[N, D\], Q <= N"):
        observed_attention(q, k[:2])


@given(st.data())
def test_whole_chunks_within_the_budget(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    attention = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=sum(lengths), max_size=sum(lengths)))
    ).double()
    budget, per_token = data.draw(st.integers(0, 25)), data.draw(st.booleans())
    first = data.draw(st.integers(0, 2))
    protected = torch.arange(len(lengths)) < first
    keep = chunks_to_keep(
        attention, torch.tensor(lengths), budget, protected=protected, per_token=per_token
    )
    sums = [float(x.sum()) for x in attention.split(lengths)]
    scores = [s / n if per_token else s for s, n in zip(sums, lengths, strict=True)]
    expected, left = set(range(first)) & set(range(len(lengths))), budget
    left -= sum(lengths[i] for i in expected)
    for i in sorted(range(first, len(lengths)), key=lambda i: (-scores[i], i)):
        left -= lengths[i]
        if left < 0:
            break
        expected.add(i)
    assert {i for i, stays in enumerate(keep.tolist()) if stays} == expected


def test_what_is_worth_most_per_token_stays():
    attention = torch.tensor([0.9, *[0.2] * 6])  # 0.9 in one token, 1.2 in six
    lengths, none = torch.tensor([1, 6]), torch.zeros(2, dtype=torch.bool)
    keep = chunks_to_keep(attention, lengths, 6, protected=none)
    assert keep.tolist() == [True, False]
    keep = chunks_to_keep(attention, lengths, 6, protected=none, per_token=False)
    assert keep.tolist() == [False, True]


def test_policies_survive_json_and_say_what_is_wrong():
    policy = chunk_kv(FixedStride(8), ratio=3.5)
    assert Policy.from_dict(policy.as_dict()) == policy
    assert "Evict(ratio=3.5" in repr(policy)
    for options, message in (
        ({"ratio": 0.5}, "ratio: expected a finite number >= 1"),
        ({"ratio": float("inf")}, "ratio: expected a finite number >= 1"),
        ({"observe": 0}, "observe: expected an integer >= 1"),
        ({"first": -1}, "first: expected an integer >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Evict(**options)
