import ops_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import few, layouts

from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Reads, Spans

covers = st.sampled_from(["window", "tail"])


def last_tokens(cu, counts):
    """Offsets of the last ``counts`` tokens of each sequence, and where those lie."""
    offsets = torch.tensor([0, *counts]).cumsum(0)
    kept = [range(end - n, end) for end, n in zip(cu[1:].tolist(), counts, strict=True)]
    return offsets, [t for of_sequence in kept for t in of_sequence]


@few
@given(layouts(n_views=2), st.integers(0, 9), covers, st.data())
def test_reads_are_what_the_rules_say(views, window, cover, data):
    cu = views[0].cu_seqlens
    counts = [data.draw(st.integers(0, n)) for n in cu.diff().tolist()]
    cu_q, tokens = last_tokens(cu, counts)
    reads = Reads.of(views, window=window, cover=cover, cu_seqlens_q=cu_q)
    assert reads.starts.tolist() == torch.cat([view.starts for view in views]).tolist()
    for g, view in enumerate(views):
        rows_before = g * len(views[0])
        assert torch.equal(reads.cu_entries[g], view.cu_chunks + rows_before)
        for i, t in enumerate(tokens):
            begin, first, _ = oracle.sequence_of(view, t)
            entries, raw = oracle.entries_and_tokens(view, t, window, cover)
            assert entries == list(range(first, first + int(reads.n_visible[g, i])))
            assert raw == list(range(int(reads.raw_start[g, i]), t + 1))
            if cover == "tail":
                covered = [j for e in entries for j in range(view.starts[e], view.ends[e])]
                assert covered + raw == list(range(begin, t + 1))


@few
@given(layouts())
def test_n_visible_is_that_of_the_chunks(chunks):
    assert torch.equal(Reads.of(chunks, window=1).n_visible[0], chunks.n_visible)


@few
@given(layouts(), st.integers(0, 4), covers, st.data())
def test_dropped_raw_tokens_move_the_rows_and_a_missing_one_is_an_error(
    chunks, window, cover, data
):
    cu = chunks.cu_seqlens
    cu_q, _ = last_tokens(cu, [data.draw(st.integers(0, n)) for n in cu.diff().tolist()])
    cu_k, kept = last_tokens(cu, [data.draw(st.integers(0, n)) for n in cu.diff().tolist()])
    whole = Reads.of(chunks, window=window, cover=cover, cu_seqlens_q=cu_q)
    sequence = torch.repeat_interleave(cu_q.diff())
    own = torch.arange(len(sequence)) + (cu - cu_q)[1:][sequence]
    needed = {
        t
        for first, last in zip(whole.raw_start[0].tolist(), own.tolist(), strict=True)
        for t in range(first, last + 1)
    }
    arguments = {"window": window, "cover": cover, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    if not needed <= set(kept):
        with pytest.raises(
            ValueError, match="cu_seqlens_k: expected all tokens that a query reads"
        ):
            Reads.of(chunks, **arguments)
        return
    moved = Reads.of(chunks, **arguments)
    assert torch.equal(moved.n_visible, whole.n_visible)
    reads_raw = whole.raw_start[0] <= own
    rows = moved.raw_start[0][reads_raw].tolist()
    assert [kept[row] for row in rows] == whole.raw_start[0][reads_raw].tolist()


def test_case_12_explicit_and_inferred_lengths_agree():
    for n in range(1, 8):
        chunks = Chunks.fixed(3, n)
        inferred = Reads.of(chunks, window=2)
        explicit = Reads.of([chunks], window=2, cu_seqlens_q=[0, n], cu_seqlens_k=n)
        assert all(torch.equal(a, b) for a, b in zip(inferred, explicit, strict=True))
        last = Reads.of(chunks, window=2, cu_seqlens_q=1)
        assert last.n_visible.item() == n // 3
        assert last.raw_start.item() == max(n - 2, 0)


def test_deepseek_v4_visibility():
    t = torch.arange(50)
    assert torch.equal(Reads.of(Chunks.fixed(4, 50), window=8).n_visible[0], (t + 1) // 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": -1}, "window: expected an integer >= 0"),
        ({"cover": "all"}, "cover: expected one of 'window', 'tail'"),
        ({"chunks": []}, "chunks: expected Chunks, or at least one view"),
        (
            {"chunks": [Chunks.fixed(2, 6), Chunks.fixed(2, 7)]},
            "chunks: expected views of the same sequences",
        ),
        ({"cu_seqlens_q": [0, 3, 6]}, "cu_seqlens_q: expected at most the sequences"),
        ({"cu_seqlens_q": 7}, "cu_seqlens_q: expected at most the sequences"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        Reads.of(**({"chunks": Chunks.fixed(2, 6), "window": 2} | changes))


def test_spans_of_a_sequence_that_opens_with_an_open_chunk():
    chunks = Chunks.from_boundaries([3], [0, 2, 6], close_last=False)
    spans = Spans.of(chunks, overlap=True)
    assert spans.before.tolist() == [0, 2, 3]
    assert spans.ends.tolist() == [0, 3, 3]
