import ops_oracle as oracle
import pytest
import torch
from agreement import assert_agree
from guards import guarded_memory
from ops_oracle import normal, random_layout
from paged import entry_pages, scatter

from dynchunk.chunks import Chunks
from dynchunk.ops.decode_topk import decode_topk
from dynchunk.ops.index_topk import index_topk
from dynchunk.ops.layout import Reads


def operands(chunks, heads=3, width=16, dtype=torch.float32, exact=False):
    """Return (q, k, weights); exact ones have small integers: equal scores and zeros are common."""
    tokens = chunks.num_tokens
    shapes = (tokens, heads, width), (len(chunks), width), (tokens, heads)
    given = [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    return [x.mul(0.7).round() for x in given] if exact else given


def reads_of(chunks, **options):
    return Reads.of(chunks, window=0, **options)


def run(inputs, reads, topk, impl, dtype):
    """Scores, indices and gradients by name."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    scores, indices = index_topk(*inputs, reads, topk, scale=0.25, impl=impl)
    weight = normal(*scores.shape, seed=9).to(scores.dtype)
    weight = weight.where(indices >= 0, torch.nan)  # of places that hold nothing
    grads = torch.autograd.grad(scores, inputs, weight if impl == "triton" else weight.nan_to_num())
    found = {"scores": scores.detach().where(indices >= 0, 0), "indices": indices}
    return found | dict(zip(("q", "k", "weights"), grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("topk", "sizes"), [(3, {}), (17, {"heads": 1, "width": 80}), (7, {"heads": 20, "width": 20})]
)
def test_equals_the_reference(topk, sizes, dtype):
    chunks = random_layout([0, 13, 13, 20], mean=2)
    inputs, reads = operands(chunks, dtype=dtype, exact=True, **sizes), reads_of(chunks)
    inputs[1][~chunks.is_closed] = torch.nan
    with guarded_memory():
        found = run(inputs, reads, topk, "triton", dtype)
    expected = run(inputs, reads, topk, "reference", torch.float64)
    assert torch.equal(found.pop("indices"), expected.pop("indices"))
    assert_agree(found, expected, dtype)


@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (63, 5), (111, 3), (257, 3)])
def test_awkward_sizes(tokens, topk):
    """Scores that are not exact: entries may change places only where scores are close."""
    chunks = random_layout([0, tokens, tokens], mean=4)
    n = min(tokens, 30)
    inputs, reads = operands(chunks), reads_of(chunks, cu_seqlens_q=[0, n, n])
    inputs = [inputs[0][-n:], inputs[1], inputs[2][-n:]]
    scores, indices = index_topk(*inputs, reads, topk, impl="triton")
    wide = [x.double() for x in inputs]
    exact = index_topk(*wide, reads, topk + 1, impl="reference")
    torch.testing.assert_close(scores.double(), exact.scores[:, :topk], rtol=1e-5, atol=1e-5)
    is_clear = (exact.scores.diff().abs() > 1e-4).all(-1) | (exact.scores[:, -1] == -torch.inf)
    assert torch.equal(indices[is_clear], exact.indices[is_clear, :topk])
    assert is_clear.any()


def test_the_last_queries_of_a_prompt():
    chunks = random_layout([0, 20, 37], mean=2)
    q, k, weights = operands(chunks)
    reads = reads_of(chunks, cu_seqlens_q=[0, 3, 12])
    inputs = q[:12], k, weights[:12]
    found = run(inputs, reads, 4, "triton", torch.float32)
    expected = run(inputs, reads, 4, "reference", torch.float64)
    assert torch.equal(found.pop("indices"), expected.pop("indices"))
    assert_agree(found, expected, torch.float32)


def test_case_22_any_number_of_entries():
    chunks = Chunks.fixed(3, [0, 0, 10, 10, 16])
    inputs, n = operands(chunks, exact=True), len(chunks)
    for topk in (0, 1, n, n + 5):
        with guarded_memory():
            found = run(inputs, reads_of(chunks), topk, "triton", torch.float32)
        expected = run(inputs, reads_of(chunks), topk, "reference", torch.float64)
        assert torch.equal(found.pop("indices"), expected.pop("indices"))
        assert_agree(found, expected, torch.float32)
    none = Chunks.fixed(3, [0, 0])
    assert index_topk(*operands(none), reads_of(none), 4, impl="triton").indices.shape == (0, 4)


def test_more_than_fit_are_found_in_several_passes(monkeypatch):
    monkeypatch.setattr("dynchunk_kernels.index_topk._MAX_KEPT", 16)
    chunks = Chunks.fixed(1, 35)
    inputs, late = operands(chunks, exact=True), [0, 3]
    inputs = [inputs[0][:3], inputs[1], inputs[2][:3]]
    reads = reads_of(chunks, cu_seqlens_q=late)
    found, expected = (index_topk(*inputs, reads, 33, impl=x) for x in ("triton", "reference"))
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("kind", ["duplicated", "zero"])
def test_case_24_the_order_does_not_depend_on_the_batch(kind):
    parts = [Chunks.fixed(stride, n) for stride, n in ((2, 9), (3, 7), (1, 8), (4, 1))]
    rows = [operands(part, 3, 20) for part in parts]
    for q, k, _ in rows:
        if kind == "duplicated":
            k[:] = k[:1]
        else:
            q.abs_()
            k.abs_().neg_()
    alone = [
        index_topk(*x, reads_of(c), 5, impl="triton") for x, c in zip(rows, parts, strict=True)
    ]
    for one, chunks in zip(alone, parts, strict=True):
        best = torch.arange(5).expand(chunks.num_tokens, 5)
        assert torch.equal(one.indices, best.where(best < chunks.n_visible[:, None], -1))
    for order in ([3, 1, 0, 2],):
        batch = (torch.cat([rows[i][n] for i in order]) for n in range(3))
        reads = reads_of(Chunks.cat([parts[i] for i in order]))
        found = index_topk(*batch, reads, 5, impl="triton")
        assert torch.equal(found.indices, torch.cat([alone[i].indices for i in order]))
        assert torch.equal(found.scores, torch.cat([alone[i].scores for i in order]))


def test_order_of_scores_that_are_not_ordinary():
    """NaN above all, minus infinity below all that is seen, -0 like 0."""
    chunks = Chunks.fixed(1, 8)
    values = [0.0, -0.0, torch.nan, torch.inf, -0.0, 1.0, -torch.nan, 0.0]
    k = torch.tensor(values)[:, None].relu() * torch.tensor([1.0])
    q, weights = torch.ones(8, 1, 1), torch.ones(8, 1)
    weights[5:] = -1
    found, expected = (
        index_topk(q, k, weights, reads_of(chunks), 9, impl=x) for x in ("triton", "reference")
    )
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.scores, expected.scores, equal_nan=True, rtol=0, atol=0)


def test_gradients_come_in_one_order():
    chunks = random_layout([0, 17], mean=2)
    inputs = operands(chunks)
    first, again = (run(inputs, reads_of(chunks), 4, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_case_19_packed_documents_do_not_leak():
    """A document full of NaN changes no bit of the others' results and gradients."""
    chunks = Chunks.fixed(2, [0, 5, 5, 14, 19])
    inputs, reads = operands(chunks), reads_of(chunks)
    before = run(inputs, reads, 3, "triton", torch.float32)
    own = chunks.sequence_ids == 2
    inputs[0][5:14] = inputs[2][5:14] = torch.nan
    inputs[1][own] = torch.nan
    after = run(inputs, reads, 3, "triton", torch.float32)
    others = [*range(5), *range(14, 19)]
    for name in ("scores", "indices", "q", "weights"):
        assert torch.equal(after[name][others], before[name][others]), name
    assert torch.equal(after["k"][~own], before["k"][~own])


def paged(chunks, at, page_size, seed=0, dtype=torch.float32):
    """What decode_topk and index_topk are given for the queries ``at``; NaN in free pages."""
    q, k, weights = operands(chunks, dtype=dtype)
    reads = reads_of(chunks)
    sequence = torch.searchsorted(chunks.cu_seqlens, at, right=True) - 1
    counts = chunks.cu_chunks.diff()[None]
    pages, total, packed, rows = entry_pages(reads, counts, page_size, seed)
    in_pages = scatter(k[packed], rows, total * page_size).unflatten(0, (total, page_size))
    new = (q[at], in_pages, weights[at], pages, sequence, reads.n_visible[:, at])
    return new, (q, k, weights, reads)


@pytest.mark.parametrize("topk", [0, 3, 17])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_case_13_decode_is_index_topk_wherever_pages_lie(topk, page_size):
    chunks = random_layout([0, 33, 33, 70], mean=2)
    at = torch.tensor([0, 5, 32, 68, 69])
    _, (q, k, weights, reads) = paged(chunks, at, page_size)
    late = reads._replace(cu_seqlens_q=torch.tensor([0, 3, 3, 5]), n_visible=reads.n_visible[:, at])
    whole = index_topk(q[at], k, weights[at], late, topk, impl="triton")
    for seed in (0, 1):
        new, _ = paged(chunks, at, page_size, seed)
        with guarded_memory():
            found = decode_topk(*new, topk, impl="triton")
        assert torch.equal(found.indices, whole.indices)
        assert torch.equal(found.scores, whole.scores)


def test_decode_equals_the_reference_over_many_spans():
    chunks = random_layout([0, 90], mean=1)
    at = torch.tensor([89, 40])
    new, _ = paged(chunks, at, 8)
    found, expected = (decode_topk(*new, 5, impl=x) for x in ("triton", "reference"))
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.indices, expected.indices)
    assert oracle.sequence_of(chunks, 89)[2] > 16  # more than one span
