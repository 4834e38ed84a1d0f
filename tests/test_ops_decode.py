import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import assert_close, few, layouts, normal, random_layout
from paged import cached

from dynchunk.chunks import Chunks
from dynchunk.ops.attend import attend
from dynchunk.ops.attend_selected import attend_selected
from dynchunk.ops.decode import decode
from dynchunk.ops.decode_topk import decode_topk
from dynchunk.ops.index_topk import index_topk
from dynchunk.ops.layout import Reads

DTYPES = {
    "reference": [torch.float64, torch.float32, torch.bfloat16],
    "cpu": [torch.float32, torch.bfloat16, torch.float16],
}
each_impl = pytest.mark.parametrize("impl", DTYPES)


def operands(views, heads=4, kv_heads=2, D=3, D_v=2, dtype=torch.float64, extras=True):
    """Operands of an attend, the views joined; D_v None: keys are the values."""
    n, per_view = sum(len(c) for c in views), kv_heads // len(views)
    T = views[0].num_tokens
    return {
        "q": normal(T, heads, D, dtype=dtype, seed=1),
        "k": normal(T, kv_heads, D, dtype=dtype, seed=2),
        "v": None if D_v is None else normal(T, kv_heads, D_v, dtype=dtype, seed=3),
        "entry_k": normal(n, per_view, D, dtype=dtype, seed=4),
        "entry_v": None if D_v is None else normal(n, per_view, D_v, dtype=dtype, seed=5),
        "bias": normal(n, per_view, dtype=dtype, seed=6) if extras else None,
        "sink": normal(heads, dtype=dtype, seed=7) if extras else None,
    }


def exact(x, reads, at, indices=None):
    """What the attends in float64 return for the queries ``at``."""
    x = {name: None if t is None else t.double() for name, t in x.items()}
    lists = {} if indices is None else {"indices": indices}
    found = (attend if indices is None else attend_selected)(reads=reads, **lists, **x)
    return found.out[at], found.lse[at]


def random_lists(rows, heads, length, n, seed=0):
    """Entries seen and not, -1, repetitions, numbers past the end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, n + 2, (rows, heads, length), generator=generator)


def some_queries(data, total):
    at = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=4, unique=True))
    return torch.tensor(at)


@each_impl
@few
@given(
    layouts(n_views=2),
    st.integers(0, 5),
    st.sampled_from(["window", "tail"]),
    st.integers(1, 5),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_equals_the_attends(
    impl, views, window, cover, page_size, list_heads, integers, shared, extras, data
):
    if views[0].num_tokens == 0:
        return
    at, dtype = some_queries(data, views[0].num_tokens), data.draw(st.sampled_from(DTYPES[impl]))
    x = operands(views, D_v=None if shared else 2, dtype=dtype, extras=extras)
    reads = Reads.of(views, window=window, cover=cover)
    indices = None if list_heads is None else random_lists(len(x["q"]), list_heads, 3, 4)
    given = cached(x, reads, at, page_size)
    given = {
        n: t if t is None or t.is_floating_point() else t.to(integers) for n, t in given.items()
    }
    lists = None if indices is None else indices[at].to(integers)
    unread = lists is not None and drop_unlisted(given, lists)
    found = decode(**(unread or given), indices=lists, impl=impl)
    out, lse = exact(x, reads, at, indices)
    assert found.out.dtype == dtype
    assert_close(found.out, out)
    assert_close(found.lse, lse, dtype if dtype == torch.float64 else torch.float32)


def drop_unlisted(given, lists):
    """Put NaN into all entries that no list of their sequence holds."""
    pages, size = given["pages"], given["entry_k"].shape[1]
    keep = torch.zeros(given["entry_k"].shape[:3], dtype=torch.bool)
    for g, of_view in enumerate(pages):
        for s, b in enumerate(given["sequence"].tolist()):
            for own in range(keep.shape[2]):
                kv = 0 if lists.shape[1] == 1 else g * keep.shape[2] + own
                for i in lists[s, kv].tolist():
                    if 0 <= i < given["n_visible"][g, s]:
                        keep[int(of_view[b, i // size]), i % size, own] = True
    poisoned = dict(given)
    for name in ("entry_k", "entry_v", "bias"):
        if given[name] is not None:
            kept = keep if given[name].ndim == 3 else keep[..., None]
            poisoned[name] = given[name].where(kept, torch.nan)
    return poisoned


@each_impl
@pytest.mark.parametrize(("tokens", "width", "page_size"), [(1, 80, 3), (63, 16, 16), (257, 96, 7)])
def test_equals_attend_at_awkward_sizes(impl, tokens, width, page_size):
    chunks = random_layout([0, tokens, tokens, tokens + 5], seed=1)
    x = operands([chunks], 6, 2, width, 24, torch.float32)
    reads, at = Reads.of(chunks, window=9), torch.tensor([tokens - 1, tokens + 4])
    found = decode(**cached(x, reads, at, page_size), impl=impl)
    out, lse = exact(x, reads, at)
    assert_close(found.out, out)
    assert_close(found.lse, lse)


@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p4_neither_batch_mates_nor_pages_change_a_bit(impl, dtype):
    views = [random_layout([0, 90, 90, 117], seed=s) for s in (0, 1)]
    x = operands(views, 8, 2, 16, 16, dtype)
    reads = Reads.of(views, window=9)
    at = torch.tensor([89, 40, 116, 3])
    lists = random_lists(len(x["q"]), 2, 9, 20)
    for indices in (None, lists):
        run = {
            seed: decode(
                **cached(x, reads, at, 4, seed),
                indices=None if indices is None else indices[at],
                impl=impl,
            )
            for seed in (0, 1)
        }
        assert torch.equal(run[0].out, run[1].out)
        for i, t in enumerate(at):
            own = None if indices is None else indices[t[None]]
            alone = decode(**cached(x, reads, t[None], 4), indices=own, impl=impl)
            assert torch.equal(alone.out[0], run[0].out[i])
            assert torch.equal(alone.lse[0], run[0].lse[i])


@each_impl
def test_p5_a_query_that_reads_nothing_gets_zero(impl):
    chunks = Chunks.fixed(2, 6)
    x = operands([chunks], extras=False, dtype=torch.float32)
    given = cached(x, Reads.of(chunks, window=1), torch.tensor([5, 3]), 2)
    given["raw_begin"] = given["raw_end"][None] + torch.tensor([[0, 2]])  # ends before it begins
    given["n_visible"] = given["n_visible"] * 0
    given |= {name: torch.full_like(given[name], torch.nan) for name in ("entry_k", "k", "v")}
    found = decode(**given, impl=impl)
    assert not found.out.any()
    assert (found.lse == -torch.inf).all()
    sink = normal(4, dtype=torch.float32)
    assert_close(decode(**given | {"sink": sink}, impl=impl).lse, sink.double().expand(2, 4))
    assert decode(**given | _no_query(given), impl=impl).out.shape == (0, 4, 2)


def _no_query(given):
    names = ("q", "sequence", "raw_end")
    return {n: given[n][:0] for n in names} | {
        n: given[n][:, :0] for n in ("n_visible", "raw_begin")
    }


@each_impl
def test_a_query_that_reads_nan_gets_nan(impl):
    chunks = Chunks.fixed(2, 6)
    x = operands([chunks], dtype=torch.float32)
    reads, at = Reads.of(chunks, window=1), torch.tensor([5, 1])
    for name, row in (("entry_v", 2), ("entry_k", 2), ("v", 5), ("k", 5)):
        bad = x | {name: x[name].clone()}
        bad[name][row] = torch.nan
        out = decode(**cached(bad, reads, at, 2), impl=impl).out
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


def test_there_is_no_gradient():
    chunks = Chunks.fixed(2, 6)
    x = operands([chunks])
    given = cached(x, Reads.of(chunks, window=1), torch.tensor([5]), 2)
    given["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        decode(**given).out.sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 2)}, r"q: expected a floating tensor of shape \[S, H, D\]"),
        ({"q": torch.zeros(1, 3, 3)}, "q: expected a multiple of the 2 heads"),
        ({"pages": torch.zeros(3, 1, 2).long()}, "k: expected a number of heads that 3 views"),
        ({"pages": torch.zeros(1, 1, 2)}, "pages: expected an int32 or int64 tensor"),
        ({"entry_k": torch.zeros(2, 2, 1, 3)}, "entry_k: .*H_kv/G = 2"),
        ({"entry_k": torch.zeros(2, 0, 2, 3)}, "entry_k: expected at least one row in a page"),
        ({"entry_v": None}, "entry_v: expected None exactly where v is None"),
        ({"entry_v": torch.zeros(3, 2, 2, 3)}, "entry_v: .*P = 2"),
        ({"bias": torch.zeros(2, 2)}, "bias: .*P = 2"),
        ({"sink": torch.zeros(3)}, "sink: .*H = 4"),
        ({"sequence": torch.zeros(2).long()}, "sequence: .*S = 1"),
        ({"n_visible": torch.zeros(1).long()}, "n_visible: .*G = 1, S = 1"),
        ({"raw_begin": torch.zeros(1, 2).long()}, "raw_begin: .*G = 1, S = 1"),
        ({"raw_end": torch.zeros(1)}, "raw_end: expected an int32 or int64 tensor"),
        ({"indices": torch.zeros(2, 3).long()}, "indices: .*R = 1"),
        ({"impl": "fast"}, "impl: expected one of None, 'reference'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    row, entry, one = torch.zeros(5, 2, 3), torch.zeros(2, 2, 2, 3), torch.ones(1, 1).long()
    given = {"q": torch.zeros(1, 4, 3), "k": row, "v": row, "entry_k": entry, "entry_v": entry}
    given |= {"pages": torch.zeros(1, 1, 2).long(), "sequence": one[0] * 0, "n_visible": one}
    given |= {"raw_begin": one, "raw_end": one[0]}
    with pytest.raises(ValueError, match=message):
        decode(**(given | changes))


def index_operands(chunks, heads=2, D=3, dtype=torch.float64):
    """Queries, keys and weights of an indexer, with many equal scores."""
    q = normal(chunks.num_tokens, heads, D, dtype=dtype, seed=1).round()
    return q, normal(len(chunks), D, dtype=dtype, seed=2).round(), normal(*q.shape[:2], dtype=dtype)


def cached_keys(k, reads, at, page_size, seed=0):
    x = {"q": k.new_zeros(len(reads.n_visible[0]), 1, 1), "entry_k": k[:, None]}
    x["k"] = k.new_zeros(int(reads.cu_seqlens_k[-1]), 1, 1)
    given = cached(x | dict.fromkeys(("v", "entry_v", "bias", "sink")), reads, at, page_size, seed)
    keys = given["entry_k"][:, :, 0]
    return {"k": keys} | {name: given[name] for name in ("pages", "sequence", "n_visible")}


@each_impl
@few
@given(layouts(max_tokens=30), st.integers(1, 5), st.integers(0, 9), st.data())
def test_topk_equals_index_topk(impl, chunks, page_size, topk, data):
    if chunks.num_tokens == 0:
        return
    at, dtype = some_queries(data, chunks.num_tokens), data.draw(st.sampled_from(DTYPES[impl]))
    q, k, weights = index_operands(chunks, dtype=dtype)
    reads = Reads.of(chunks, window=0)
    given = cached_keys(k, reads, at, page_size)
    found = decode_topk(q[at], weights=weights[at], topk=topk, impl=impl, **given)
    expected = index_topk(q, k, weights, reads, topk, impl=impl)
    assert torch.equal(found.scores, expected.scores[at])
    assert torch.equal(found.indices, expected.indices[at])


@each_impl
def test_topk_of_nothing(impl):
    chunks = Chunks.fixed(2, [0, 1, 6])
    q, k, weights = index_operands(chunks, dtype=torch.float32)
    reads = Reads.of(chunks, window=0)
    given = cached_keys(k, reads, torch.tensor([0]), 2)
    found = decode_topk(q[:1], weights=weights[:1], topk=3, impl=impl, **given)
    assert (found.scores == -torch.inf).all()
    assert (found.indices == -1).all()
    none = given | {"sequence": given["sequence"][:0], "n_visible": given["n_visible"][:, :0]}
    assert decode_topk(q[:0], weights=weights[:0], topk=3, impl=impl, **none).scores.shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 3)}, "q: expected a floating tensor"),
        ({"k": torch.zeros(4, 3)}, r"k: .*\[P, page_size, D\]"),
        ({"k": torch.zeros(2, 0, 3)}, "k: expected at least one row in a page"),
        ({"weights": torch.zeros(1, 3)}, "weights: .*H = 2"),
        ({"pages": torch.zeros(2, 1, 2).long()}, r"pages \(of one view\)"),
        ({"sequence": torch.zeros(2).long()}, "sequence: .*S = 1"),
        ({"n_visible": torch.zeros(1).long()}, r"n_visible \(of one view\)"),
        ({"topk": -1}, "topk: expected an integer >= 0"),
        ({"impl": "fast"}, "impl: expected one of None, 'reference'"),
    ],
)
def test_topk_errors_name_the_argument(changes, message):
    one = torch.ones(1, 1).long()
    given = {"q": torch.zeros(1, 2, 3), "k": torch.zeros(2, 2, 3), "weights": torch.zeros(1, 2)}
    given |= {"pages": one[None], "sequence": one[0] * 0, "n_visible": one, "topk": 1}
    with pytest.raises(ValueError, match=message):
        decode_topk(**(given | changes))
