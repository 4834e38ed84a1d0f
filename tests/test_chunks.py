import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynchunk import NEVER, BoundaryRule, Chunks, FixedStride, Kind, cu_seqlens_from_mask
from dynchunk.chunks import InvariantError
from dynchunk.testing.strategies import padded_batches, rules, scores


@st.composite
def any_chunks(draw: st.DrawFn) -> Chunks:
    """Chunks of packed sequences, some empty, from rules, grids, lengths and views."""
    rows = draw(st.lists(scores(max_tokens=30), min_size=1, max_size=4))
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0)
    x = torch.cat(rows)
    maker = draw(st.sampled_from(["rule", "fixed", "given", "lengths"]))
    if maker == "rule":
        chunks = draw(rules())(x, cu)
    elif maker == "fixed":
        stride = draw(st.integers(1, 9))
        chunks = Chunks.fixed(stride, cu, draw(st.integers(0, stride - 1)))
    elif maker == "given":
        chunks = Chunks.from_boundaries(x > 0.5, cu)
    else:
        lengths = [length for n in map(len, rows) for length in ([2] * (n // 2) + [1] * (n % 2))]
        chunks = Chunks.from_lengths(lengths, cu)
    view = draw(st.sampled_from(["none", "shifted", "midpoints"]))
    if view == "shifted":
        return chunks.shifted(draw(st.integers(-9, 9)))
    return chunks.midpoints() if view == "midpoints" else chunks


@given(any_chunks())
def test_invariants_hold_and_derived_tensors_agree_with_a_loop(chunks):
    chunks.check()
    ids, slots, visible = [], [], []
    for b in range(chunks.num_sequences):
        first, last = chunks.cu_chunks[b : b + 2].tolist()
        begin, end = chunks.cu_seqlens[b : b + 2].tolist()
        for t in range(begin, end):
            i = max(i for i in range(first, last) if chunks.starts[i] <= t)
            assert t < chunks.ends[i]
            ids.append(i)
            slots.append(t - int(chunks.starts[i]))
            visible.append(sum(int(v) <= t for v in chunks.visible_from[first:last]))
    assert chunks.ids.tolist() == ids
    assert chunks.slots.tolist() == slots
    assert chunks.n_visible.tolist() == visible
    assert chunks.lengths.tolist() == torch.bincount(chunks.ids, minlength=len(chunks)).tolist()


@given(any_chunks())
def test_slicing_and_concatenating_are_inverse(chunks):
    parts = [chunks.sequence(b).check() for b in range(chunks.num_sequences)]
    assert Chunks.cat(parts).check().equal(chunks)


@given(any_chunks(), st.integers(-9, 9))
def test_shifted_moves_every_boundary(chunks, k):
    for b in range(chunks.num_sequences):
        one = chunks.sequence(b)
        moved = one.shifted(k)
        known = dict(zip(one.ends.tolist(), one.visible_from.tolist(), strict=True))
        closings = {e + k: max(v, e + k - 1) for e, v in known.items() if v != NEVER}
        if k > 0:
            closings[k] = k - 1
        expected = {e: v for e, v in closings.items() if 0 < e <= one.num_tokens}
        ends, closed = moved.ends.tolist(), moved.is_closed.tolist()
        got = dict(zip(ends, moved.visible_from.tolist(), strict=True))
        assert {e: v for (e, v), c in zip(got.items(), closed, strict=True) if c} == expected


@given(any_chunks())
def test_midpoints_are_known_when_their_chunk_is_closed(chunks):
    for b in range(chunks.num_sequences):
        one = chunks.sequence(b)
        views = one.midpoints()
        spans = zip(
            one.starts.tolist(), one.lengths.tolist(), one.visible_from.tolist(), strict=True
        )
        expected = [(s + n // 2, v) for s, n, v in spans if v != NEVER and s + n // 2 > 0]
        starts, known = views.starts[1:].tolist(), views.visible_from[:-1].tolist()
        assert list(zip(starts, known, strict=True)) == expected


def test_fixed_has_v4_visibility():
    chunks = Chunks.fixed(4, [0, 11, 11, 16])
    assert chunks.n_visible.tolist() == [(t + 1) // 4 for t in [*range(11), *range(5)]]
    assert chunks.ratio == 4.0
    assert chunks.cu_chunks.tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("k", range(1, 8))
def test_a_shifted_grid_is_a_staggered_grid(stride, k):
    if k < stride:
        assert (
            Chunks.fixed(stride, [0, 0, 1, 23])
            .shifted(k)
            .equal(Chunks.fixed(stride, [0, 0, 1, 23], offset=k))
        )


def test_empty_and_single_token_sequences():
    nothing = Chunks.fixed(4, [0]).check()
    assert (len(nothing), nothing.num_sequences, nothing.n_visible.tolist()) == (0, 0, [])
    for chunks in (Chunks.fixed(4, 0), Chunks.from_lengths([]), BoundaryRule(1)(torch.zeros(0))):
        chunks.check()
        assert (len(chunks), chunks.num_tokens, chunks.ids.tolist()) == (0, 0, [])
    one = BoundaryRule(1)(torch.zeros(1)).check()
    assert (one.starts.tolist(), one.visible_from.tolist()) == ([0], [NEVER])
    assert one.ratio != one.ratio


def test_from_boundaries_names_sequence_starts_itself():
    chunks = Chunks.from_boundaries([2, 6, 8], [0, 5, 8, 11]).check()
    assert chunks.starts.tolist() == [0, 2, 5, 6, 8]
    assert chunks.visible_from.tolist() == [1, NEVER, 5, NEVER, NEVER]
    assert Chunks.from_boundaries(torch.tensor([1, 0, 1, 0, 0]).bool(), 5).starts.tolist() == [0, 2]
    assert Chunks.from_boundaries([], 5, confirmed_at=[]).starts.tolist() == [0]
    closed = Chunks.from_boundaries([2, 6], [0, 5, 8], close_last=True)
    assert closed.visible_from.tolist() == [1, 4, 5, 7]
    assert closed.kinds.tolist() == [Kind.START, Kind.GIVEN, Kind.START, Kind.GIVEN]


@given(padded_batches(), rules())
def test_padding_left_or_right_changes_no_row(batch, rule):
    x, mask = batch
    chunks = rule(x, mask=mask).check()
    assert chunks.cu_seqlens.equal(cu_seqlens_from_mask(mask))
    for b in range(len(x)):
        assert chunks.sequence(b).equal(rule(x[b][mask[b]]))
    assert FixedStride(3)(x, mask=mask).equal(Chunks.fixed(3, chunks.cu_seqlens))


def test_a_batch_without_mask_is_not_padded():
    x = torch.rand(3, 20)
    assert BoundaryRule(1)(x).equal(BoundaryRule(1)(x.flatten(), [0, 20, 40, 60]))


def test_moves_between_devices():
    chunks = Chunks.fixed(4, 10).to("meta")
    assert chunks.device.type == "meta"
    assert chunks.starts.shape == (3,)


def test_is_immutable_and_prints_what_it_is():
    chunks = Chunks.fixed(4, 10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunks.starts = torch.zeros(1)
    assert repr(chunks) == "Chunks(sequences=1, tokens=10, chunks=3, ratio=4.00, device=cpu)"


GOOD = {
    "cu_seqlens": torch.tensor([0, 6, 10]),
    "starts": torch.tensor([0, 4, 6]),
    "visible_from": torch.tensor([4, NEVER, NEVER]),
    "kinds": torch.tensor([Kind.START, Kind.CONTENT, Kind.START], dtype=torch.int8),
}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("starts", torch.tensor([0, 4, 6], dtype=torch.int32), "dtypes"),
        ("kinds", torch.tensor([0, 1, 0], dtype=torch.int8, device="meta"), "one device"),
        ("visible_from", torch.tensor([4, NEVER]), "shapes"),
        ("cu_seqlens", torch.tensor([0, 10, 6]), "cu_seqlens begins at 0"),
        ("starts", torch.tensor([0, 0, 6]), "starts increases strictly"),
        ("starts", torch.tensor([0, 4, 10]), "starts lies in"),
        ("starts", torch.tensor([0, 4, 7]), "every sequence that is not empty"),
        ("visible_from", torch.tensor([NEVER, NEVER, NEVER]), "only the last chunk"),
        ("visible_from", torch.tensor([2, NEVER, NEVER]), "not before the chunk's last token"),
        ("visible_from", torch.tensor([6, NEVER, NEVER]), "closed chunk lies in its sequence"),
        ("kinds", torch.tensor([0, 0, 0], dtype=torch.int8), "kinds is START"),
        ("kinds", torch.tensor([0, 9, 0], dtype=torch.int8), "values of Kind"),
    ],
)
def test_check_names_the_first_invariant_that_fails(field, value, named):
    Chunks(**GOOD).check()
    with pytest.raises(InvariantError, match=named):
        Chunks(**{**GOOD, field: value}).check()


def test_check_sees_visibility_that_decreases():
    chunks = Chunks(
        torch.tensor([0, 6]),
        torch.tensor([0, 2, 3]),
        torch.tensor([5, 3, NEVER]),
        torch.tensor([0, 1, 1], dtype=torch.int8),
    )
    with pytest.raises(InvariantError, match="never decreases within"):
        chunks.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Chunks.fixed(0, 4), "stride: expected an integer >= 1, got 0"),
        (lambda: Chunks.fixed(4, 4, offset=4), "offset: expected an integer in \\[0, 4\\)"),
        (lambda: Chunks.fixed(4, [0, 5, 3]), "cu_seqlens: expected offsets that never decrease"),
        (lambda: Chunks.fixed(4, [1, 5]), "cu_seqlens: expected 0 in front"),
        (lambda: Chunks.fixed(4, [0.0, 5.0]), "cu_seqlens: expected integers"),
        (lambda: Chunks.from_lengths([2, 0]), "lengths: expected integers \\[N\\], each >= 1"),
        (lambda: Chunks.from_lengths([2, 2], [0, 3, 4]), "every sequence to end where a chunk"),
        (lambda: Chunks.from_lengths([2, 2], 5), "lengths: expected a sum of 5 tokens, got 4"),
        (lambda: Chunks.from_boundaries([3, 3], 8), "strictly increasing positions"),
        (lambda: Chunks.from_boundaries([8], 8), "positions in \\[0, 8\\)"),
        (lambda: Chunks.from_boundaries([1.5], 8), "boundaries: expected positions"),
        (lambda: Chunks.from_boundaries(torch.ones(3).bool(), 8), "bool of shape \\[8\\]"),
        (lambda: Chunks.from_boundaries([2, 4], 8, [5]), "confirmed_at: expected integers \\[2\\]"),
        (lambda: Chunks.from_boundaries([2, 4], 8, [6, 5]), "confirmed_at: expected tokens"),
        (lambda: Chunks.from_boundaries([2, 4], 8, [6, 8]), "confirmed_at: expected tokens"),
        (lambda: Chunks.cat([]), "parts: expected at least one"),
        (lambda: Chunks.fixed(4, 8).sequence(1), "b: expected an integer in \\[0, 1\\)"),
        (lambda: cu_seqlens_from_mask(torch.ones(3)), "mask: expected a bool"),
        (lambda: cu_seqlens_from_mask(torch.tensor([[1, 0, 1]])), "got 2 runs in row 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_shifts_are_integers():
    with pytest.raises(TypeError, match="k: expected an integer"):
        Chunks.fixed(4, 8).shifted(1.5)
