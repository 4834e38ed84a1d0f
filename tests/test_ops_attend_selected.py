import ops_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import assert_close, few, layouts, normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.attend import attend
from dynchunk.ops.attend_selected import attend_selected
from dynchunk.ops.attend_selected_chunks import attend_selected_chunks
from dynchunk.ops.layout import Reads

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def lists(rows, heads, length, n, seed=0, dtype=torch.int64):
    """Random lists: entries seen and not, -1, repetitions, numbers past the end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, n + 2, (rows, heads, length), generator=generator).to(dtype)


def raw(tokens, heads, kv_heads, width, width_v=None, dtype=torch.float64):
    """Return (q, k, v); v is None where the keys are the values."""
    q, k = (normal(tokens, h, width, dtype=dtype, seed=h) for h in (heads, kv_heads))
    return q, k, None if width_v is None else normal(tokens, kv_heads, width_v, dtype=dtype, seed=9)


def entries(views, per_view, width, dtype=torch.float64, seed=0):
    return [
        normal(len(c), per_view, width, dtype=dtype, seed=seed + g) for g, c in enumerate(views)
    ]


def listed(indices, t, kv):
    return {int(i) for i in indices[t, kv if indices.shape[1] > 1 else 0]}


def entry_rows(indices, window, cover):
    """What a query reads of listed entries, for the oracle."""

    def rows_of(chunks, t, kv):
        _, first, _ = oracle.sequence_of(chunks, t)
        seen, tokens = oracle.entries_and_tokens(chunks, t, window, cover)
        return [i for i in seen if i - first in listed(indices, t, kv)], tokens

    return rows_of


def chunk_rows(indices, window, block=1):
    """What a query reads of listed chunks, for the oracle."""

    def rows_of(chunks, t, kv):
        begin, first, n = oracle.sequence_of(chunks, t)
        before = sum(
            -(-size // block) for size in chunks.cu_seqlens.diff()[: _b(chunks, t)].tolist()
        )
        wanted = listed(indices, before + (t - begin) // block, kv)
        tokens = set(oracle.entries_and_tokens(chunks, t, window, "window")[1])
        for i in range(n):
            if i in wanted:
                tokens |= set(range(chunks.starts[first + i], chunks.ends[first + i]))
        return [], sorted(j for j in tokens if j <= t)

    return rows_of


def _b(chunks, t):
    return int(torch.searchsorted(chunks.cu_seqlens, t, right=True)) - 1


def n_blocks(cu, block):
    return sum(-(-size // block) for size in cu.diff().tolist())


@few
@given(
    layouts(n_views=2),
    st.integers(0, 5),
    st.sampled_from(["window", "tail"]),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2]),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_entries_equal_a_loop(views, window, cover, dtype, list_heads, index_dtype, shared):
    q, k, v = raw(views[0].num_tokens, 4, 2, 3, None if shared else 2, dtype=dtype)
    entry_k, bias = entries(views, 1, 3, dtype), [x[:, :, 0] for x in entries(views, 1, 1, dtype)]
    entry_v = None if shared else entries(views, 1, 2, dtype, seed=5)
    sink, indices = normal(4, dtype=dtype), lists(len(q), list_heads, 3, 4, dtype=index_dtype)
    reads = Reads.of(views, window=window, cover=cover)
    found = attend_selected(q, k, v, entry_k, entry_v, indices, reads, bias=bias, sink=sink)
    rows_of = entry_rows(indices, window, cover)
    out, lse = oracle.attend(q, k, v, entry_k, entry_v, views, rows_of, bias, sink)
    assert_close(found.out, out)
    assert_close(found.lse, lse, torch.float32 if dtype == torch.bfloat16 else dtype)


@few
@given(
    layouts(n_views=2),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2]),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
def test_chunks_equal_a_loop(views, window, dtype, list_heads, block, shared, has_sink):
    q, k, v = raw(views[0].num_tokens, 4, 2, 3, None if shared else 2, dtype=dtype)
    sink = normal(4, dtype=dtype) if has_sink else None
    indices = lists(n_blocks(views[0].cu_seqlens, block), list_heads, 3, 4)
    reads = Reads.of(views, window=window)
    found = attend_selected_chunks(q, k, v, indices, reads, block=block, sink=sink)
    none = [x[:0] for x in entries(views, 1, 3)]
    none_v = None if shared else [x[:0] for x in entries(views, 1, 2)]
    rows_of = chunk_rows(indices, window, block)
    out, lse = oracle.attend(q, k, v, none, none_v, views, rows_of, sink=sink)
    assert_close(found.out, out)
    assert_close(found.lse, lse, torch.float32 if dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (2, 60), (63, 100), (111, 16)])
def test_equal_a_loop_at_awkward_sizes(tokens, width):
    chunks = random_layout([0, tokens, tokens, tokens + 5])
    q, k, v = raw(tokens + 5, 6, 2, width, 16, dtype=torch.float32)
    (entry_k,), (entry_v,) = (entries([chunks], 2, w, torch.float32) for w in (width, 16))
    indices, reads = lists(len(q), 2, 7, 20), Reads.of(chunks, window=9)
    found = attend_selected(q, k, v, entry_k, entry_v, indices, reads)
    rows_of = entry_rows(indices, 9, "window")
    out, _ = oracle.attend(q, k, v, [entry_k], [entry_v], [chunks], rows_of)
    assert_close(found.out, out)
    found = attend_selected_chunks(q, k, v, indices, reads)
    rows_of = chunk_rows(indices, 9)
    out, _ = oracle.attend(q, k, v, [entry_k[:0]], [entry_v[:0]], [chunks], rows_of)
    assert_close(found.out, out)


@few
@given(layouts(max_tokens=5), st.integers(0, 2), st.booleans(), st.integers(1, 3))
def test_gradients(chunks, window, shared, block):
    if chunks.num_tokens == 0:
        return
    q, k, v = raw(chunks.num_tokens, 4, 2, 2, None if shared else 3)
    (entry_k,), (entry_v,), sink = entries([chunks], 2, 2), entries([chunks], 2, 3), normal(4)
    indices, reads = lists(len(q), 2, 3, 3), Reads.of(chunks, window=window)
    blocks = lists(n_blocks(chunks.cu_seqlens, block), 1, 2, 3)

    def of_entries(q, k, entry_k, sink, *values):
        v, entry_v = values or (None, None)
        return tuple(attend_selected(q, k, v, entry_k, entry_v, indices, reads, sink=sink))

    def of_chunks(q, k, sink, *values):
        v = values[0] if values else None
        return tuple(attend_selected_chunks(q, k, v, blocks, reads, sink=sink, block=block))

    inputs = [x.requires_grad_() for x in (q, k, entry_k, sink)]
    values = [] if v is None else [x.requires_grad_() for x in (v, entry_v)]
    assert torch.autograd.gradcheck(of_entries, inputs + values, fast_mode=True)
    assert torch.autograd.gradcheck(of_chunks, [q, k, sink, *values[:1]], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_low_precision(dtype):
    chunks = random_layout([0, 63, 63, 111])
    q, k, v = raw(111, 6, 2, 16, 16, dtype=dtype)
    (entry_k,), (entry_v,) = (entries([chunks], 2, 16, dtype, seed) for seed in (0, 5))
    indices, reads = lists(111, 2, 7, 12), Reads.of(chunks, window=7)
    both = (
        (lambda q, k, v, a, b: attend_selected(q, k, v, a, b, indices, reads), 5),
        (lambda q, k, v: attend_selected_chunks(q, k, v, indices, reads), 3),
    )
    for run, n in both:
        grads = []
        for cast in (torch.float64, dtype):
            inputs = [x.to(cast).requires_grad_() for x in (q, k, v, entry_k, entry_v)[:n]]
            out = run(*inputs).out
            grads.append(torch.autograd.grad(out, inputs, normal(*out.shape, dtype=dtype).to(cast)))
        for exact, found in zip(*grads, strict=True):
            assert_close(found, exact, dtype)


@few
@given(layouts(), st.integers(0, 4))
def test_all_entries_listed_is_attend(chunks, window):
    q, k, v = raw(chunks.num_tokens, 4, 2, 3, 2)
    (entry_k,), (entry_v,) = entries([chunks], 2, 3), entries([chunks], 2, 2)
    reads = Reads.of(chunks, window=window)
    indices = torch.arange(len(chunks)).flip(0).expand(len(q), -1)
    found = attend_selected(q, k, v, entry_k, entry_v, indices, reads)
    everything = attend(q, k, v, entry_k, entry_v, reads)
    assert torch.equal(found.out, everything.out)
    assert torch.equal(found.lse, everything.lse)


@few
@given(layouts(), st.integers(0, 4))
def test_all_chunks_listed_is_full_attention(chunks, window):
    q, k, v = raw(chunks.num_tokens, 4, 2, 3, 2)
    indices = torch.arange(len(chunks)).repeat(len(q), 2)
    found = attend_selected_chunks(q, k, v, indices, Reads.of(chunks, window=window))
    whole = attend_selected_chunks(
        q, k, v, indices[:, :0], Reads.of(chunks, window=chunks.num_tokens)
    )
    assert torch.equal(found.out, whole.out)


@few
@given(layouts(), st.integers(0, 4), st.sampled_from([float("nan"), -1e9]), st.data())
def test_p5_p6_rows_that_a_query_does_not_read_may_hold_anything(chunks, window, poison, data):
    """Case 20 too: entries and tokens after a query, or not in its list, change no bit."""
    if chunks.num_tokens == 0:
        return
    t = data.draw(st.integers(0, chunks.num_tokens - 1))
    q, k, _ = raw(chunks.num_tokens, 4, 2, 3)
    (entry_k,) = entries([chunks], 2, 3)
    indices, reads = lists(len(q), 1, 2, 3), Reads.of(chunks, window=window)

    def run(k, entry_k):
        of_entries = attend_selected(q, k, None, entry_k, None, indices, reads)
        return of_entries, attend_selected_chunks(q, k, None, indices, reads)

    rows = [
        entry_rows(indices, window, "window")(chunks, t, 0),
        chunk_rows(indices, window)(chunks, t, 0),
    ]
    for mode, (kept_entries, kept_tokens) in enumerate(rows):
        poisoned = k.clone(), entry_k.clone()
        for x, kept in zip(poisoned, (kept_tokens, kept_entries), strict=True):
            x[[i for i in range(len(x)) if i not in kept]] = poison
        assert torch.equal(run(k, entry_k)[mode].out[t], run(*poisoned)[mode].out[t])


@pytest.mark.parametrize("stride", [2, 3, 5])
def test_case_3_any_split_of_a_prompt_is_one_shot(stride):
    n = 3 * stride + 1
    chunks = Chunks.fixed(stride, n)
    q, k, _ = raw(n, 4, 2, 3)
    (entry_k,) = entries([chunks], 2, 3)
    indices, reads = lists(n, 2, 2, 3), Reads.of(chunks, window=2)
    whole = attend_selected(q, k, None, entry_k, None, indices, reads)
    of_chunks = attend_selected_chunks(q, k, None, indices, reads)
    for a in range(n):
        now = Chunks.fixed(stride, n - a)
        for first in range(n - a):
            rest, rows = slice(first, n - a), slice(len(now))
            cu_q = [0, n - a - first]
            late = Reads.of(now, window=2, cu_seqlens_q=cu_q)
            given = q[rest], k[: n - a], None
            found = attend_selected(*given, entry_k[rows], None, indices[rest], late)
            assert_close(found.out, whole.out[rest].numpy())
            found = attend_selected_chunks(*given, indices[rest], late)
            assert_close(found.out, of_chunks.out[rest].numpy())


@pytest.mark.parametrize("stride", [3, 5])
def test_case_15_rows_of_a_batch_of_eight_are_those_of_one(stride):
    one, eight = Chunks.fixed(stride, 13), Chunks.fixed(stride, [13 * b for b in range(9)])
    q, k, _ = raw(13, 4, 2, 3, dtype=torch.float32)
    (entry_k,) = entries([one], 2, 3, torch.float32)
    indices = lists(13, 1, 2, 4)
    alone = attend_selected(q, k, None, entry_k, None, indices, Reads.of(one, window=2))
    rows = [x.repeat(8, 1, 1) for x in (q, k, entry_k, indices)]
    reads = Reads.of(eight, window=2)
    batch = attend_selected(rows[0], rows[1], None, rows[2], None, rows[3], reads)
    assert torch.equal(batch.out, alone.out.repeat(8, 1, 1))
    alone = attend_selected_chunks(q, k, None, indices, Reads.of(one, window=2))
    batch = attend_selected_chunks(rows[0], rows[1], None, rows[3], reads)
    assert torch.equal(batch.out, alone.out.repeat(8, 1, 1))


@pytest.mark.parametrize("stride", [2, 3, 4, 8])
def test_case_19_packed_documents_do_not_leak(stride):
    cu = [0, 1, stride, stride, 2 * stride + 1, 3 * stride + 2]
    chunks = Chunks.fixed(stride, cu)
    q, k, _ = raw(cu[-1], 4, 2, 3)
    (entry_k,) = entries([chunks], 2, 3)
    indices, reads = lists(cu[-1], 1, 3, 3), Reads.of(chunks, window=2)

    def run(q, k, entry_k):
        yield attend_selected(q, k, None, entry_k, None, indices, reads).out
        yield attend_selected_chunks(q, k, None, indices, reads).out

    for b in range(chunks.num_sequences):
        changed = [x.clone() for x in (q, k, entry_k)]
        changed[0][cu[b] : cu[b + 1]] = changed[1][cu[b] : cu[b + 1]] = torch.nan
        changed[2][chunks.sequence_ids == b] = torch.nan
        others = [t for t in range(cu[-1]) if not cu[b] <= t < cu[b + 1]]
        for before, after in zip(run(q, k, entry_k), run(*changed), strict=True):
            assert torch.equal(after[others], before[others])


def test_case_22_empty_lists_and_empty_sequences():
    chunks = Chunks.fixed(3, [0, 0, 4, 4])
    q, k, _ = raw(4, 4, 2, 3)
    (entry_k,) = entries([chunks], 2, 3)
    reads, nothing = Reads.of(chunks, window=2), torch.zeros(4, 1, 0, dtype=torch.int64)
    of_entries = attend_selected(q, k, None, entry_k, None, nothing, reads)
    of_chunks = attend_selected_chunks(q, k, None, nothing, reads)
    assert torch.equal(of_entries.out, of_chunks.out)
    blind = attend_selected(q, k, None, entry_k, None, nothing - 1, Reads.of(chunks, window=0))
    assert not blind.out.any()
    assert (blind.lse == -torch.inf).all()
    no_query = Reads.of(chunks, window=2, cu_seqlens_q=[0, 0, 0, 0])
    assert attend_selected_chunks(q[:0], k, None, nothing[:0], no_query).out.shape == (0, 4, 3)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.zeros(5, 1, 2, dtype=torch.int64), "indices: .*with R = 6"),
        (torch.zeros(6, 3, 2, dtype=torch.int64), "indices: .*H_kv = 2"),
        (torch.zeros(6, 2), "indices: expected an int32 or int64 tensor"),
        (torch.zeros(6, dtype=torch.int64), "indices: expected"),
    ],
)
def test_errors_name_the_argument(indices, message):
    chunks = Chunks.fixed(2, 6)
    q, k, _ = raw(6, 4, 2, 3)
    (entry_k,) = entries([chunks], 2, 3)
    with pytest.raises(ValueError, match=message):
        attend_selected(q, k, None, entry_k, None, indices, Reads.of(chunks, window=1))


def test_errors_of_blocks():
    q, k, _ = raw(6, 4, 2, 3)
    reads, indices = Reads.of(Chunks.fixed(2, 6), window=1), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="indices: expected 3 rows, one for each block"):
        attend_selected_chunks(q, k, None, indices, reads, block=2)
    with pytest.raises(ValueError, match="block: expected an integer >= 1"):
        attend_selected_chunks(q, k, None, indices, reads, block=0)
