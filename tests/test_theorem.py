"""The boundary theorem (docs/boundaries.md), part by part, on every score family and every form."""

import os
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from oracle import oracle
from torch import Tensor

from dynchunk import NEVER, BoundaryRule, DelimiterScore, HashScore, Kind
from dynchunk.chunks import Chunks
from dynchunk.testing import assert_streaming_equals_offline
from dynchunk.testing.strategies import FAMILIES, edits, rules, scores

# Seven properties: 2,800 cases in CI, 56,000 in the nightly profile.
CASES = settings(max_examples=8_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 400)
IMPLS = ("cpu", "reference")


def both(rule: BoundaryRule, x: Tensor, cu_seqlens=None) -> Chunks:
    """The chunks of the numba form, after checking that the torch form gives the same."""
    numba, torch_form = (rule(x, cu_seqlens, impl=impl).check() for impl in IMPLS)
    assert numba.equal(torch_form)
    return numba


def boundaries(chunks: Chunks) -> list[tuple[int, int, int]]:
    """(position, confirmed at, kind) of each chunk's start, for one sequence."""
    known = [0, *chunks.visible_from.tolist()][: len(chunks)]
    return list(zip(chunks.starts.tolist(), known, chunks.kinds.tolist(), strict=True))


@CASES
@given(rules(), scores())
def test_both_forms_equal_the_oracle(rule, x):
    assert boundaries(both(rule, x)) == oracle(x.tolist(), rule)


@CASES
@given(rules(), st.lists(scores(max_tokens=40), max_size=5))
def test_packed_sequences_do_not_know_each_other(rule, rows):
    cu = list(accumulate([0, *map(len, rows)]))
    packed = both(rule, torch.cat([torch.zeros(0), *rows]), cu)
    for b, row in enumerate(rows):
        assert packed.sequence(b).equal(rule(row))


@CASES
@given(rules(), scores())
def test_lengths_lie_within_bounds(rule, x):
    chunks = both(rule, x)
    lengths = chunks.lengths[chunks.is_closed].tolist()
    assert all(1 <= n <= rule.max_length for n in lengths[:1])
    assert all(rule.min_length <= n <= rule.max_length for n in lengths[1:])
    assert all(c > b + rule.radius for b, c in pairwise(content(chunks))) or rule.ladder


@CASES
@given(rules(), scores(), st.data())
def test_streaming_equals_offline(rule, x, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=6)))
    sizes = [b - a for a, b in pairwise([0, *cuts, len(x)])]
    assert_streaming_equals_offline(rule, x, [sizes, [1] * len(x)])
    chunks = rule(x)
    closed = chunks.is_closed
    assert bool((chunks.visible_from - chunks.ends <= rule.max_lag)[closed].all())
    assert bool((chunks.visible_from - chunks.starts <= rule.min_window)[closed].all())


@CASES
@given(rules(), scores(), scores(), scores(min_tokens=1))
def test_content_boundaries_are_local(rule, front, other_front, common):
    one, two = (both(rule, torch.cat([x, common])) for x in (front, other_front))
    p, q = len(front), len(other_front)
    reach = rule.locality
    assert [t - p for t in content(one) if t >= p + reach] == [
        t - q for t in content(two) if t >= q + reach
    ]


@CASES
@given(rules(), scores(), scores(), scores(min_tokens=24))
def test_all_boundaries_agree_after_the_first_common_content_boundary(
    rule, front, other_front, common
):
    one, two = (both(rule, torch.cat([x, common])) for x in (front, other_front))
    p, q = len(front), len(other_front)
    after = [t - p for t in content(one) if t >= p + rule.locality]
    event(f"resynchronises: {bool(after)}")
    if after:
        assert tail(one, after[0] + p, p) == tail(two, after[0] + q, q)


@CASES
@given(rules(), scores(), scores(), st.data())
def test_what_was_known_before_an_edit_stays(rule, x, other, data):
    at = data.draw(st.integers(0, len(x)))
    one, two = both(rule, x), both(rule, torch.cat([x[:at], other]))
    known = [[b for b in boundaries(chunks) if b[1] < at] for chunks in (one, two)]
    assert known[0] == known[1]


@given(rules(), edits(), st.sampled_from([0, 1, 2, 3]))
def test_scored_text_resynchronises_after_its_receptive_field(rule, edit, n):
    score = HashScore(n) if n else DelimiterScore.from_bytes() + 0.5 * HashScore(2)
    one, two = (both(rule, score(tokens)) for tokens in (edit.before, edit.after))
    reach = rule.locality + score.receptive_field
    after = [t for t in content(one) if t >= edit.p + reach]
    assert [t - edit.p for t in after] == [t - edit.q for t in content(two) if t >= edit.q + reach]
    if after:
        shifted = after[0] - edit.p + edit.q
        assert tail(one, after[0], edit.p) == tail(two, shifted, edit.q)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_drawn_as_it_is_called(family):
    @settings(max_examples=20, database=None)
    @given(scores(families=(family,)))
    def check(x):
        assert x.dtype == torch.float32
        assert not x.isnan().any()

    check()


def test_constant_scores_degenerate_to_a_fixed_grid():
    chunks = both(BoundaryRule(radius=1, max_length=4), torch.zeros(14))
    assert chunks.starts.tolist() == [0, 4, 8, 12]
    assert chunks.visible_from.tolist() == [5, 9, 13, NEVER]


def test_radius_zero_is_the_threshold_rule():
    x = torch.tensor([0.9, 0.1, 0.6, 0.7, 0.2, 0.5])
    chunks = both(BoundaryRule(radius=0, threshold=0.5, max_length=100), x)
    assert chunks.starts.tolist() == [0, 2, 3, 5]
    assert chunks.visible_from.tolist() == [2, 3, 5, NEVER]


def test_a_forced_cut_moves_back_to_leave_the_minimum():
    x = torch.zeros(16)
    x[9] = 1.0
    chunks = both(BoundaryRule(radius=2, min_length=3, max_length=8), x)
    assert boundaries(chunks) == [
        (0, 0, Kind.START),
        (6, 11, Kind.FORCED),
        (9, 11, Kind.CONTENT),
    ]


def test_the_bounds_on_lag_and_window_are_reached():
    rule = BoundaryRule(radius=1, min_length=2, max_length=5)
    x = torch.zeros(12)
    x[[6, 9]] = 1.0
    assert boundaries(both(rule, x))[1] == (4, 7, Kind.FORCED)
    assert rule.max_lag == 7 - 4
    assert boundaries(both(rule, torch.zeros(12)))[1] == (5, 7, Kind.FORCED)
    assert rule.min_window == 7


def test_the_ladder_cuts_where_the_content_does():
    x = torch.zeros(23)
    x[[3, 6, 9, 12]] = torch.tensor([1.0, 2, 3, 4])
    rule = BoundaryRule(radius=4, min_length=2, max_length=8)
    assert boundaries(both(rule, x)) == [
        (0, 0, Kind.START),
        (8, 13, Kind.FORCED),
        (12, 16, Kind.CONTENT),
    ]
    assert boundaries(both(replace(rule, ladder=True), x)) == [
        (0, 0, Kind.START),
        (3, 13, Kind.CONTENT),
        (6, 16, Kind.CONTENT),
        (9, 19, Kind.CONTENT),
        (12, 22, Kind.CONTENT),
    ]


def content(chunks: Chunks) -> list[int]:
    return chunks.starts[chunks.kinds == Kind.CONTENT].tolist()


def tail(chunks: Chunks, first: int, origin: int) -> list[tuple[int, int, int]]:
    """Boundaries from ``first`` on, positions and times counted from ``origin``."""
    return [(t - origin, at - origin, kind) for t, at, kind in boundaries(chunks) if t >= first]
