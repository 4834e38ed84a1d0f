import ops_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import ATOL, assert_close, few, layouts, normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.index_topk import index_topk
from dynchunk.ops.layout import Reads


def operands(chunks, heads=2, width=3, dtype=torch.float64):
    """Return (q, k, weights)."""
    tokens = chunks.num_tokens
    shapes = (tokens, heads, width), (len(chunks), width), (tokens, heads)
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def small_integers(chunks, heads=2, width=2):
    """Operands whose scores are exact, often equal and often zero."""
    return [x.mul(1.2).round() for x in operands(chunks, heads, width)]


def padded(rows, topk, fill):
    values = [row + [fill] * (topk - len(row)) for row in rows]
    dtype = torch.float64 if isinstance(fill, float) else torch.int64
    return torch.tensor(values, dtype=dtype).reshape(len(rows), topk)


def reads_of(chunks, **options):
    return Reads.of(chunks, window=0, **options)


@few
@given(layouts(), st.integers(0, 6), st.sampled_from([torch.float64, torch.float32]))
def test_scores_equal_a_loop(chunks, topk, dtype):
    q, k, weights = operands(chunks, dtype=dtype)
    found = index_topk(q, k, weights, reads_of(chunks), topk)
    scores, _ = oracle.index_topk(q.double(), k.double(), weights.double(), chunks, topk)
    assert_close(found.scores, padded(scores, topk, -torch.inf))
    exact = index_topk(q.double(), k.double(), weights.double(), reads_of(chunks), topk + 1).scores
    clear = (exact.diff().abs() > 2 * ATOL[dtype]).all(-1)
    wide = index_topk(q.double(), k.double(), weights.double(), reads_of(chunks), topk)
    assert torch.equal(found.indices[clear], wide.indices[clear])


@few
@given(layouts(), st.integers(0, 6))
def test_p9_ties_come_in_the_order_of_indices(chunks, topk):
    q, k, weights = small_integers(chunks)
    found = index_topk(q, k, weights, reads_of(chunks), topk, scale=2**-0.5)
    _, indices = oracle.index_topk(q, k, weights, chunks, topk)
    assert torch.equal(found.indices, padded(indices, topk, -1))


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (2, 60), (63, 100), (111, 128)])
def test_equals_a_loop_at_awkward_sizes(tokens, width):
    chunks = random_layout([0, tokens, tokens, tokens + 5])
    q, k, weights = operands(chunks, 3, width)
    found = index_topk(q, k, weights, reads_of(chunks), 7)
    scores, indices = oracle.index_topk(q, k, weights, chunks, 7)
    assert_close(found.scores, padded(scores, 7, -torch.inf))
    assert torch.equal(found.indices, padded(indices, 7, -1))


def test_case_22_any_topk():
    chunks = Chunks.fixed(3, [0, 0, 10, 10, 25])
    q, k, weights = operands(chunks)
    everything = index_topk(q, k, weights, reads_of(chunks), len(chunks))
    for topk in (0, 1, len(chunks), len(chunks) + 5):
        found = index_topk(q, k, weights, reads_of(chunks), topk)
        assert found.indices.shape == found.scores.shape == (25, topk)
        kept = min(topk, len(chunks))
        assert torch.equal(found.indices[:, :kept], everything.indices[:, :kept])
        assert (found.indices[:, kept:] == -1).all()
        assert (found.scores[:, kept:] == -torch.inf).all()
    none = Chunks.fixed(3, [0, 0])
    assert index_topk(*operands(none), reads_of(none), 4).indices.shape == (0, 4)


@pytest.mark.parametrize("kind", ["duplicated", "zero"])
def test_case_24_the_order_does_not_depend_on_the_batch(kind):
    parts = [Chunks.fixed(stride, n) for stride, n in ((2, 37), (3, 20), (1, 24), (4, 1))]
    rows = [operands(part, 3, 20, torch.float32) for part in parts]
    for q, k, _ in rows:
        if kind == "duplicated":
            k[:] = k[:1]
        else:
            q.abs_()
            k.abs_().neg_()
    alone = [index_topk(*x, reads_of(c), 5) for x, c in zip(rows, parts, strict=True)]
    for one, chunks in zip(alone, parts, strict=True):
        best = torch.arange(5).expand(chunks.num_tokens, 5)
        seen = chunks.n_visible[:, None]
        assert torch.equal(one.indices, best.where(best < seen, -1))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]):
        batch = (torch.cat([rows[i][n] for i in order]) for n in range(3))
        found = index_topk(*batch, reads_of(Chunks.cat([parts[i] for i in order])), 5)
        assert torch.equal(found.indices, torch.cat([alone[i].indices for i in order]))
        assert torch.equal(found.scores, torch.cat([alone[i].scores for i in order]))


@few
@given(layouts(max_sequences=1), st.integers(0, 4))
def test_p3_one_token_at_a_time_gives_the_same_bits(chunks, topk):
    q, k, weights = operands(chunks, 4, 20, torch.float32)
    whole = index_topk(q, k, weights, reads_of(chunks), topk)
    for t in range(chunks.num_tokens):
        n = int(chunks.n_visible[t])
        reads = reads_of(chunks)
        alone = reads._replace(
            cu_seqlens_q=torch.tensor([0, 1]),
            cu_entries=torch.tensor([[0, n]]),
            n_visible=reads.n_visible[:, t : t + 1],
        )
        found = index_topk(q[t : t + 1], k[:n], weights[t : t + 1], alone, topk)
        assert torch.equal(found.indices, whole.indices[t : t + 1])
        assert torch.equal(found.scores, whole.scores[t : t + 1])


@few
@given(layouts(), st.sampled_from([float("nan"), float("inf"), 1e9]), st.data())
def test_p5_p6_entries_that_a_query_does_not_see_may_hold_anything(chunks, poison, data):
    if chunks.num_tokens == 0:
        return
    t = data.draw(st.integers(0, chunks.num_tokens - 1))
    q, k, weights = operands(chunks)
    before = index_topk(q, k, weights, reads_of(chunks), 3)
    seen, _ = oracle.entries_and_tokens(chunks, t, 0, "window")
    k[[i for i in range(len(chunks)) if i not in seen]] = poison
    after = index_topk(q, k, weights, reads_of(chunks), 3)
    assert torch.equal(before.indices[t], after.indices[t])
    assert torch.equal(before.scores[t], after.scores[t])


def test_p5_open_chunks_change_no_gradient():
    chunks = random_layout([0, 20, 27])
    grads = []
    for poison in (0.0, torch.nan):
        q, k, weights = operands(chunks)
        k[~chunks.is_closed] = poison
        inputs = [x.requires_grad_() for x in (q, k, weights)]
        scores = index_topk(*inputs, reads_of(chunks), 2).scores
        grads.append(torch.autograd.grad(scores[scores.isfinite()].sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@few
@given(layouts(max_tokens=6), st.integers(0, 3))
def test_gradients(chunks, topk):
    if chunks.num_tokens == 0:
        return
    inputs = [x.requires_grad_() for x in operands(chunks)]

    def scores(*given):
        found = index_topk(*given, reads_of(chunks), topk).scores
        return found.where(found.isfinite(), 0)

    assert torch.autograd.gradcheck(scores, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(6, 2)}, r"q: .*\[S, H, D\]"),
        ({"k": torch.zeros(3, 4)}, "k: .*D = 3"),
        ({"k": torch.zeros(4, 3)}, "k: expected 3 rows, as laid out"),
        ({"weights": torch.zeros(6, 3)}, "weights: .*S = 6, H = 2"),
        ({"topk": -1}, "topk: expected an integer >= 0"),
        ({"reads": Reads.of([Chunks.fixed(2, 6)] * 2, window=0)}, "reads.n_visible .of one view"),
    ],
)
def test_errors_name_the_argument(changes, message):
    chunks = Chunks.fixed(2, 6)
    q, k, weights = operands(chunks)
    arguments = {"q": q, "k": k, "weights": weights, "reads": reads_of(chunks), "topk": 2}
    with pytest.raises(ValueError, match=message):
        index_topk(**(arguments | changes))
