from itertools import pairwise

import ops_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import assert_close, few, layouts, normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.attend import attend
from dynchunk.ops.layout import Reads, Spans
from dynchunk.ops.pool import pool

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
NAMES = ("q", "k", "v", "entry_k", "entry_v", "bias", "sink")
POISONS = [float("nan"), float("inf"), -1e9]
covers = st.sampled_from(["window", "tail"])
impl = None  # of the tests that run at the moment


@pytest.fixture(params=["reference", "batched"], scope="module", autouse=True)
def _each_impl(request):
    global impl
    impl = request.param


def operands(views, heads=2, kv_heads=1, width=3, width_v=3, shared=False, dtype=torch.float64):
    """Return the floating inputs by name, entries and bias as one tensor for each view."""
    tokens, per_view = views[0].num_tokens, kv_heads // len(views)

    def rows(channels, seed):
        return [
            normal(len(view), per_view, *channels, dtype=dtype, seed=seed + g)
            for g, view in enumerate(views)
        ]

    return {
        "q": normal(tokens, heads, width, dtype=dtype, seed=1),
        "k": normal(tokens, kv_heads, width, dtype=dtype, seed=2),
        "v": None if shared else normal(tokens, kv_heads, width_v, dtype=dtype, seed=3),
        "entry_k": rows([width], 10),
        "entry_v": None if shared else rows([width_v], 20),
        "bias": rows([], 30),
        "sink": normal(heads, dtype=dtype, seed=4),
    }


def expected(x, views, window, cover):
    return oracle.attend(
        **{name: x[name] for name in NAMES if name not in ("bias", "sink")},
        views=views,
        rows_of=lambda view, t, _: oracle.entries_and_tokens(view, t, window, cover),
        bias=x["bias"],
        sink=x["sink"],
    )


def flat(x):
    """The same inputs with the views joined, and those that are None left out."""
    joined = {n: torch.cat(t) if isinstance(t, list) else t for n, t in x.items()}
    return {name: t for name, t in joined.items() if t is not None}


def run(x, reads, **options):
    x = {name: x.get(name) for name in NAMES}
    options = {"impl": impl} | options
    return attend(*(x[n] for n in NAMES[:5]), reads, bias=x["bias"], sink=x["sink"], **options)


@few
@given(
    layouts(),
    st.integers(0, 6),
    covers,
    st.sampled_from(DTYPES),
    st.sampled_from([(2, 1), (6, 2), (2, 2)]),
    st.sampled_from(["shared", "separate"]),
    st.booleans(),
    st.booleans(),
)
def test_equals_a_loop(chunks, window, cover, dtype, heads, values, has_bias, has_sink):
    x = operands([chunks], *heads, width_v=2, shared=values == "shared", dtype=dtype)
    x |= {} if has_bias else {"bias": None}
    x |= {} if has_sink else {"sink": None}
    found = run(x, Reads.of(chunks, window=window, cover=cover))
    out, lse = expected(x, [chunks], window, cover)
    assert found.out.dtype == dtype
    assert_close(found.out, out)
    assert_close(found.lse, lse, torch.float32 if dtype == torch.bfloat16 else dtype)


@few
@given(layouts(n_views=2), st.integers(0, 6), covers)
def test_views_split_the_kv_heads_in_order(views, window, cover):
    x = operands(views, 8, 4)
    found = run(x, Reads.of(views, window=window, cover=cover))
    out, lse = expected(x, views, window, cover)
    assert_close(found.out, out)
    assert_close(found.lse, lse)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (2, 100), (63, 60), (63, 512), (111, 100)])
def test_equals_a_loop_at_awkward_sizes(tokens, width):
    chunks = random_layout([0, tokens, tokens, tokens + 5])
    for cover in ("window", "tail"):
        x = operands([chunks], 6, 2, width, 16, dtype=torch.float32)
        found = run(x, Reads.of(chunks, window=9, cover=cover))
        out, lse = expected(x, [chunks], 9, cover)
        assert_close(found.out, out)
        assert_close(found.lse, lse)


@few
@given(layouts(max_tokens=5), st.integers(0, 3), covers, st.booleans(), st.booleans())
def test_gradients(chunks, window, cover, shared, has_sink):
    x = flat(operands([chunks], 4, 2, 2, 3, shared=shared))
    x |= {} if has_sink else {"sink": None}
    reads = Reads.of(chunks, window=window, cover=cover)
    names = [name for name, t in x.items() if t is not None]

    def outputs(*given):
        found = run(dict(zip(names, given, strict=True)), reads)
        return found.out, found.lse.where(found.lse.isfinite(), 0)

    inputs = [x[name].requires_grad_() for name in names]
    assert chunks.num_tokens == 0 or torch.autograd.gradcheck(outputs, inputs, fast_mode=True)


def test_gradients_with_views_and_a_sink_for_all():
    views = [random_layout([0, 3, 3, 9], 2, seed) for seed in (0, 1)]
    x = flat(operands(views, 4, 2, 2, 3))
    reads = Reads.of(views, window=2)
    inputs = [t.requires_grad_() for t in x.values()]
    assert torch.autograd.gradcheck(
        lambda *given: tuple(run(dict(zip(x, given, strict=True)), reads)), inputs
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_in_low_precision(dtype, shared):
    chunks = random_layout([0, 63, 63, 111])
    reads = Reads.of(chunks, window=7)
    x = flat(operands([chunks], 6, 2, 16, 16, shared=shared, dtype=dtype))
    grads = []
    for cast in (torch.float64, dtype):
        inputs = {name: t.detach().to(cast).requires_grad_() for name, t in x.items()}
        out, lse = run(inputs, reads)
        given = [normal(*t.shape, dtype=dtype).to(t.dtype) for t in (out, lse)]
        grads.append(torch.autograd.grad([out, lse], list(inputs.values()), given))
    for exact, found in zip(*grads, strict=True):
        assert_close(found, exact, dtype)


def test_a_query_that_sees_nothing_returns_zero():
    chunks = Chunks.fixed(4, 6)
    x = operands([chunks]) | {"bias": None, "sink": None}
    found = run(x, Reads.of(chunks, window=0))
    assert not found.out[:3].any()
    assert (found.lse[:3] == -torch.inf).all()
    x["sink"] = torch.tensor([0.5, -2.0], dtype=torch.float64)
    found = run(x, Reads.of(chunks, window=0))
    assert not found.out[:3].any()
    assert_close(found.lse[:3], x["sink"].expand(3, 2))


def test_log_length_lets_an_entry_weigh_as_much_as_its_equal_tokens():
    chunks = Chunks.from_lengths([2, 5, 1, 4])
    x = operands([chunks]) | {"sink": None}
    x["k"], x["v"] = (
        torch.repeat_interleave(x[n][0], chunks.lengths, 0) for n in ("entry_k", "entry_v")
    )
    x["bias"] = chunks.lengths.double().log()
    by_entries = run(x, Reads.of(chunks, window=0))
    by_tokens = run(x, Reads.of(chunks, window=12, cover="tail"))
    closed = chunks.ends - 1
    assert_close(by_entries.out[closed], by_tokens.out[closed].numpy())
    assert_close(by_entries.lse[closed], by_tokens.lse[closed].numpy())


def test_splits_over_entries_combine_by_lse():
    chunks = random_layout([0, 40])
    x = operands([chunks]) | {"sink": None}
    whole = run(x, Reads.of(chunks, window=5))
    entries = run(x, Reads.of(chunks, window=0))
    none = Chunks.from_boundaries([], 40)
    raw = run(
        x | {name: [x[name][0][:1]] for name in ("entry_k", "entry_v", "bias")},
        Reads.of(none, window=5),
    )
    lse = torch.logaddexp(entries.lse, raw.lse)
    out = sum((part.lse - lse).exp()[..., None] * part.out for part in (entries, raw))
    assert_close(out, whole.out.numpy())
    assert_close(lse, whole.lse.numpy())


def part_of(x, chunks, t):
    """Inputs and chunks of the first t tokens, as a stream would have them."""
    now = Chunks.from_boundaries(chunks.starts[chunks.starts < t], t)
    visible = chunks.visible_from.clone()
    visible[visible >= t] = torch.iinfo(torch.int64).max
    now = Chunks(now.cu_seqlens, now.starts, visible[: len(now)], now.kinds)
    rows = {name: [x[name][0][: len(now)]] for name in ("entry_k", "entry_v", "bias")}
    return now, x | rows | {"k": x["k"][:t], "v": x["v"][:t]}


@pytest.mark.parametrize("cover", ["window", "tail"])
@pytest.mark.parametrize("stride", [2, 3, 4, 8])
def test_case_3_any_split_of_a_prompt_is_one_shot(stride, cover):
    n = 3 * stride + 1
    chunks = Chunks.fixed(stride, n)
    x = operands([chunks], 4, 2)
    whole = run(x, Reads.of(chunks, window=3, cover=cover))
    splits = [(a, b) for a in range(n + 1) for b in range(a, n + 1)]
    for a, b in splits if stride < 4 else splits[::7]:
        for first, last in ((0, a), (a, b), (b, n)):
            now, given = part_of(x, chunks, last)
            reads = Reads.of(now, window=3, cover=cover, cu_seqlens_q=last - first)
            found = run(given | {"q": x["q"][first:last]}, reads)
            assert_close(found.out, whole.out[first:last].numpy())
            assert_close(found.lse, whole.lse[first:last].numpy())


@few
@given(layouts(max_sequences=1), covers, st.integers(0, 4))
def test_case_17_token_by_token_with_only_the_raw_tokens_that_are_read(chunks, cover, window):
    x = operands([chunks], 4, 2)
    whole = run(x, Reads.of(chunks, window=window, cover=cover))
    for t in range(chunks.num_tokens):
        now, given = part_of(x, chunks, t + 1)
        full = Reads.of(now, window=window, cover=cover, cu_seqlens_q=1)
        kept = t + 1 - int(full.raw_start[0, 0])
        reads = Reads.of(now, window=window, cover=cover, cu_seqlens_q=1, cu_seqlens_k=kept)
        given |= {"q": x["q"][t : t + 1]} | {n: given[n][t + 1 - kept :] for n in ("k", "v")}
        found = run(given, reads)
        assert_close(found.out, whole.out[t : t + 1].numpy())
        assert_close(found.lse, whole.lse[t : t + 1].numpy())


@few
@given(layouts(), covers, st.integers(0, 4))
def test_p4_a_sequence_alone_gives_the_same(chunks, cover, window):
    x = operands([chunks], 4, 2, dtype=torch.float32)
    found = run(x, Reads.of(chunks, window=window, cover=cover))
    for b in range(chunks.num_sequences):
        tokens, rows = (
            slice(*cu[b : b + 2].tolist()) for cu in (chunks.cu_seqlens, chunks.cu_chunks)
        )
        alone = x | {n: x[n][tokens] for n in ("q", "k", "v")}
        alone |= {n: [x[n][0][rows]] for n in ("entry_k", "entry_v", "bias")}
        one = run(alone, Reads.of(chunks.sequence(b), window=window, cover=cover))
        atol = 0.0 if impl == "reference" else 1e-6  # padding to other lengths moves the last bit
        torch.testing.assert_close(one.out, found.out[tokens], rtol=0, atol=atol)
        torch.testing.assert_close(one.lse, found.lse[tokens], rtol=0, atol=atol)


@few
@given(
    layouts(),
    covers,
    st.integers(0, 4),
    st.sampled_from(POISONS),
    st.data(),
)
def test_p5_p6_rows_that_a_query_does_not_read_may_hold_anything(
    chunks, cover, window, poison, data
):
    """Case 20 too: whatever comes after a query, entries included, changes no bit of its output."""
    if chunks.num_tokens == 0:
        return
    t = data.draw(st.integers(0, chunks.num_tokens - 1))
    reads = Reads.of(chunks, window=window, cover=cover)
    x = flat(operands([chunks], 4, 2))
    clean = run(x, reads)
    poisoned = run(
        poison_all_but(x, poison, *oracle.entries_and_tokens(chunks, t, window, cover)), reads
    )
    assert torch.equal(clean.out[t], poisoned.out[t])
    assert torch.equal(clean.lse[t], poisoned.lse[t])


@few
@given(layouts(), covers, st.integers(0, 4), st.sampled_from(POISONS), st.booleans())
def test_p5_rows_that_no_query_reads_change_no_gradient(chunks, cover, window, poison, shared):
    last = [b - 1 for a, b in pairwise(chunks.cu_seqlens.tolist()) if a < b]
    cu_q = (chunks.cu_seqlens.diff() > 0).long().cumsum(0)
    reads = Reads.of(
        chunks, window=window, cover=cover, cu_seqlens_q=torch.nn.functional.pad(cu_q, (1, 0))
    )
    read = [oracle.entries_and_tokens(chunks, t, window, cover) for t in last]
    x = flat(operands([chunks], 4, 2, shared=shared))
    x["q"] = x["q"][last]
    poisoned = poison_all_but(x, poison, *([i for r in read for i in r[n]] for n in (0, 1)))
    grads = []
    for inputs in (x, poisoned):
        found = run({name: tensor.requires_grad_() for name, tensor in inputs.items()}, reads)
        loss = found.out.square().sum() + found.lse.where(found.lse.isfinite(), 0).sum()
        grads.append(torch.autograd.grad(loss, list(inputs.values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def poison_all_but(x, poison, entries, tokens):
    """Copies of the inputs, with every other row of entries and of raw tokens replaced."""
    poisoned = {name: tensor.clone() for name, tensor in x.items()}
    for kept, names in ((entries, ("entry_k", "entry_v", "bias")), (tokens, ("k", "v"))):
        for name in poisoned.keys() & set(names):
            others = torch.ones(len(poisoned[name]), dtype=torch.bool)
            others[kept] = False
            poisoned[name][others] = poison
    return poisoned


def test_a_value_that_is_not_finite_reaches_whoever_reads_it():
    chunks = Chunks.fixed(2, 6)
    x = operands([chunks])
    x["v"][3, 0, 1] = torch.inf
    out = run(x, Reads.of(chunks, window=2)).out
    assert out.isnan().any(-1).any(-1).tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize("stride", [2, 3, 4, 5, 8])
def test_case_15_rows_of_a_batch_of_eight_are_those_of_one(stride):
    one, eight = Chunks.fixed(stride, 13), Chunks.fixed(stride, [13 * b for b in range(9)])
    x = operands([one], 4, 2, dtype=torch.float32)
    alone = run(x, Reads.of(one, window=3))
    repeated = {n: t.repeat(8, *[1] * (t.ndim - 1)) for n, t in flat(x).items() if n != "sink"}
    batch = run(repeated | {"sink": x["sink"]}, Reads.of(eight, window=3))
    assert torch.equal(batch.out, alone.out.repeat(8, 1, 1))


@pytest.mark.parametrize("stride", [2, 3, 4, 8])
def test_case_19_packed_documents_do_not_leak(stride):
    cu = [0, 1, stride, stride, 2 * stride + 1, 3 * stride + 2]
    chunks = Chunks.fixed(stride, cu)
    reads = Reads.of(chunks, window=2 * stride)
    x = flat(operands([chunks], 4, 2))
    before = run(x, reads)
    for b in range(chunks.num_sequences):
        changed = {name: tensor.clone() for name, tensor in x.items()}
        for name in ("q", "k", "v"):
            changed[name][cu[b] : cu[b + 1]] = torch.nan
        for name in ("entry_k", "entry_v", "bias"):
            changed[name][chunks.sequence_ids == b] = torch.nan
        others = [t for t in range(cu[-1]) if not cu[b] <= t < cu[b + 1]]
        after = run(changed, reads)
        assert torch.equal(after.out[others], before.out[others])
        assert torch.equal(after.lse[others], before.lse[others])


def test_case_2_padding_left_or_right_is_no_part_of_a_packed_row():
    lengths, total = (5, 9, 16), 16 + 5
    rows = [normal(n, 2, 3, seed=n) for n in lengths]
    packed = torch.cat(rows)
    chunks = Chunks.fixed(4, [0, 5, 14, 30])
    x = operands([chunks], 2, 2) | {"q": packed, "k": packed, "v": packed}
    exact = run(x, Reads.of(chunks, window=3)).out
    for pad in range(5):
        for side in ("left", "right"):
            padded = torch.full((3, total, 2, 3), torch.nan, dtype=torch.float64)
            mask = torch.zeros(3, total, dtype=torch.bool)
            for b, n in enumerate(lengths):
                first = pad if side == "right" else total - n - pad
                mask[b, first : first + n] = True
            padded[mask] = packed
            same = x | dict.fromkeys(("q", "k", "v"), padded[mask])
            assert torch.equal(run(same, Reads.of(chunks, window=3)).out, exact)


@pytest.mark.parametrize("cover", ["window", "tail"])
@pytest.mark.parametrize("stride", [2, 3, 4, 8])
def test_case_20_no_token_changes_an_output_before_it(stride, cover):
    """For all pairs (t, j): the entries are those of the perturbed keys."""
    n = 2 * stride + 3
    chunks = Chunks.fixed(stride, n)
    reads, spans = Reads.of(chunks, window=2, cover=cover), Spans.of(chunks, overlap=True)
    q, x = normal(n, 4, 3), normal(n, 2, 6, seed=1)

    def out(x):
        return attend(q, x[..., :3], None, pool(x, spans, gate=x), None, reads).out

    exact = out(x)
    for j in range(n):
        changed = x.clone()
        changed[j] += 1
        assert torch.equal(out(changed)[:j], exact[:j])
        assert not torch.equal(out(changed)[j], exact[j])


def test_case_22_empty_sequences_and_no_query():
    chunks = Chunks.fixed(3, [0, 0, 4, 4])
    x = operands([chunks])
    assert run(x, Reads.of(chunks, window=2)).out.shape == (4, 2, 3)
    reads = Reads.of(chunks, window=2, cu_seqlens_q=[0, 0, 0, 0])
    inputs = {name: t.requires_grad_() for name, t in flat(x | {"q": x["q"][:0]}).items()}
    found = run(inputs, reads)
    assert found.out.shape == (0, 2, 3)
    assert found.lse.shape == (0, 2)
    found.out.sum().backward()
    assert not any(t.grad.any() for t in inputs.values())


_KV2 = torch.zeros(6, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(6, 2)}, r"q: expected a floating tensor of shape \[S, H, D\]"),
        ({"q": torch.zeros(6, 3, 3), "k": _KV2, "v": _KV2}, "q: expected a multiple of the 2"),
        ({"q": torch.zeros(5, 2, 3)}, "reads.n_visible: .* with G = 1, S = 5"),
        ({"k": torch.zeros(6, 1, 4)}, r"k: .*\[T, H_kv, D\] with .*D = 3"),
        ({"k": torch.zeros(5, 1, 3), "v": torch.zeros(5, 1, 3)}, "k: expected 6 rows, as laid out"),
        ({"v": torch.zeros(5, 1, 3)}, "v: .*with T = 6"),
        ({"v": None}, "entry_v: expected None exactly where v is None"),
        ({"entry_k": torch.zeros(2, 1, 3), "entry_v": torch.zeros(2, 1, 3)}, "entry_k: .* 3 rows"),
        ({"entry_v": torch.zeros(3, 1, 2)}, "entry_v: .*D_v = 3"),
        ({"bias": torch.zeros(2)}, r"bias: .*broadcasts to \[3, 1\]"),
        ({"sink": torch.zeros(3)}, "sink: .*H = 2"),
        ({"impl": "fast"}, "impl: expected one of None, 'reference'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    row, entry = torch.zeros(6, 1, 3), torch.zeros(3, 1, 3)
    arguments = {"q": torch.zeros(6, 2, 3), "k": row, "v": row, "entry_k": entry, "entry_v": entry}
    reads = Reads.of(Chunks.fixed(2, 6), window=1)
    with pytest.raises(ValueError, match=message):
        attend(**(arguments | {"reads": reads} | changes))


def test_views_must_divide_the_kv_heads():
    reads = Reads.of([Chunks.fixed(2, 6), Chunks.fixed(3, 6)], window=1)
    row, entry = torch.zeros(6, 1, 3), torch.zeros(3, 1, 3)
    with pytest.raises(ValueError, match="k: expected a number of heads that 2 views divide"):
        attend(row, row, None, entry, None, reads)
