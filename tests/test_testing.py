"""The assertions for users' own code must pass what is right and fail what is wrong."""

import subprocess
import sys

import pytest
import torch

from dynchunk import BoundaryRule, Chunks, DelimiterScore, FixedStride, HashScore
from dynchunk.boundaries import Boundary
from dynchunk.testing import (
    assert_causal,
    assert_padding_inert,
    assert_phase_invariant,
    assert_resynchronises,
    assert_streaming_equals_offline,
    sample_text,
)

RULE = BoundaryRule(radius=2, min_length=2, max_length=16)
SCORE = DelimiterScore.from_bytes() + 0.5 * HashScore(4)
EMBED = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))


def content(tokens):
    return RULE(SCORE(tokens))


def fixed(stride):
    return lambda tokens: Chunks.fixed(stride, len(tokens))


def mean_pool(segment, by_slot=False):
    def compress(tokens):
        chunks = segment(tokens)
        x = EMBED[tokens] * (1 + chunks.slots[:, None] if by_slot else 1)
        sums = torch.zeros(len(chunks), 8).index_add(0, chunks.ids, x)
        return (sums / chunks.lengths[:, None])[chunks.is_closed], chunks.starts[chunks.is_closed]

    return compress


def test_content_boundaries_resynchronise():
    assert_resynchronises(content)
    assert_resynchronises(content, prefixes=range(100, 116), filler=ord(" "))
    assert_resynchronises(lambda tokens: content(tokens).shifted(2))
    assert_resynchronises(lambda tokens: content(tokens).midpoints())


@pytest.mark.parametrize("stride", [2, 3, 4, 8, 128])
def test_a_fixed_stride_does_not(stride):
    with pytest.raises(AssertionError, match="prefix of 1 token: no common boundary"):
        assert_resynchronises(fixed(stride))
    with pytest.raises(AssertionError, match="prefix of 1 token: no common boundary"):
        assert_phase_invariant(mean_pool(fixed(stride)))
    assert_resynchronises(fixed(stride), prefixes=[stride, 2 * stride], within=256)


def test_a_rule_that_counts_tokens_does_not_either():
    def counting(tokens):
        starts = content(tokens).starts
        return Chunks.from_boundaries(starts[starts % 3 > 0], len(tokens))

    with pytest.raises(AssertionError, match=r"prefix of \d+ tokens?: (starts|ends) differ"):
        assert_resynchronises(counting)


def test_closing_later_after_a_prefix_is_seen():
    def late(tokens):
        chunks = content(tokens)
        known = (chunks.visible_from[:-1] + len(tokens) % 2).clamp(max=len(tokens) - 1)
        return Chunks.from_boundaries(chunks.starts[1:], len(tokens), known)

    with pytest.raises(AssertionError, match="visible_from differ"):
        assert_resynchronises(late)


def test_phase_invariance_of_entries():
    assert_phase_invariant(mean_pool(content))
    assert_phase_invariant(mean_pool(content, by_slot=True))

    def by_position(tokens):
        entries, starts = mean_pool(content)(tokens)
        return entries + 0.01 * (starts[:, None] % 4), starts

    with pytest.raises(AssertionError, match="prefix of 1 token: the entry of the chunk"):
        assert_phase_invariant(by_position)
    assert_phase_invariant(by_position, atol=0.1)
    assert_phase_invariant(lambda tokens: (content(tokens).lengths, content(tokens)))
    with pytest.raises(ValueError, match=r"compress: expected one start per entry \(2\)"):
        assert_phase_invariant(lambda tokens: (torch.zeros(2), torch.zeros(3)))


class Lying:
    """A rule whose stream gives the right boundaries, but not as it should."""

    def __init__(self, lie):
        self.lie = lie

    def __call__(self, scores):
        return RULE(scores)

    def stream(self):
        inner, lie = RULE.stream(), self.lie

        class Stream:
            def push(self, scores):
                return lie(inner.push(scores))

        return Stream()


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (
            lambda found: [Boundary(b.position, b.confirmed_at - 1, b.kind) for b in found],
            "came with",
        ),
        (lambda found: found[:-1], "on one side only"),
        (lambda found: [Boundary(b.position + 1, *b[1:]) for b in found], "on one side only"),
    ],
)
def test_a_lying_stream_is_found_out(lie, message):
    scores = SCORE(sample_text(200))
    assert_streaming_equals_offline(RULE, scores)
    assert_streaming_equals_offline(Lying(lambda found: found), scores)
    assert_streaming_equals_offline(FixedStride(4), scores)
    with pytest.raises(AssertionError, match=message):
        assert_streaming_equals_offline(Lying(lie), scores)


def test_splits_must_cover_the_scores():
    with pytest.raises(ValueError, match="splits: expected sizes that sum to 9"):
        assert_streaming_equals_offline(RULE, torch.rand(9), [[4, 4]])


def test_causality():
    assert_causal(lambda x: x.cumsum(0), torch.randn(12, 3))
    assert_causal(lambda tokens: content(tokens).n_visible, sample_text(120))
    with pytest.raises(AssertionError, match="tokens from 1 on change the output at 0"):
        assert_causal(lambda x: x.flip(0), torch.randn(12, 3))
    with pytest.raises(AssertionError, match="change the output"):
        assert_causal(lambda tokens: content(tokens).ids, sample_text(120))


def test_padding():
    rows = [torch.randn(n, 2) for n in (5, 1, 9)]

    def running_sum(x, mask):
        return torch.where(mask[..., None], x, 0).cumsum(1)

    assert_padding_inert(running_sum, rows)
    with pytest.raises(AssertionError, match=r"row 0 with 4 tokens of left padding \(nan\)"):
        assert_padding_inert(lambda x, mask: (x * mask[..., None]).cumsum(1), rows)
    with pytest.raises(
        AssertionError, match=r"row 0 with 4 tokens of left padding \(1000000000.0\)"
    ):
        assert_padding_inert(lambda x, mask: x.nan_to_num().cumsum(1), rows)
    with pytest.raises(AssertionError, match=r"left padding \(8\)"):
        assert_padding_inert(lambda x, mask: x.cumsum(1), [torch.arange(4), torch.arange(9)])


def test_padding_and_packed_chunks():
    """CASES 2: each row of a padded batch is cut as if alone."""
    rows = [SCORE(sample_text(n, seed=n)) for n in (5, 9, 16, 40)]

    def slots(x, mask):
        out = torch.zeros(x.shape, dtype=torch.int64)
        out[mask] = RULE(x, mask=mask).slots
        return out

    assert_padding_inert(slots, rows)


def test_assertions_need_no_hypothesis_and_strategies_say_so():
    code = (
        "import sys; sys.modules['hypothesis'] = None; import dynchunk.testing\n"
        "try: import dynchunk.testing.strategies\n"
        "except ImportError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'dynchunk[test]'" in out.stdout
