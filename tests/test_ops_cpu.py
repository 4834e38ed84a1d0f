"""What all numba implementations have in common: threads, padding, bits, dtypes, numbers."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import few, layouts, normal, random_layout
from paged import cached

from dynchunk.chunks import Chunks
from dynchunk.ops.attend import attend
from dynchunk.ops.attend_selected import attend_selected
from dynchunk.ops.attend_selected_chunks import attend_selected_chunks
from dynchunk.ops.cpu import _threads as loops
from dynchunk.ops.decode import decode
from dynchunk.ops.decode_topk import decode_topk
from dynchunk.ops.index_topk import index_topk
from dynchunk.ops.layout import Reads, Spans
from dynchunk.ops.pool import pool

CU = [0, 190, 190, 257]
VIEWS = [random_layout(CU, seed=s) for s in (0, 1)]
READS, ONE_VIEW = Reads.of(VIEWS, window=37), Reads.of(VIEWS[0], window=0)
N = sum(len(c) for c in VIEWS)
LISTS = torch.randint(-1, 40, (CU[-1], 1, 9), generator=torch.Generator().manual_seed(0))
LAST = torch.tensor([189, 256, 60])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(D=24, D_v=16, heads=6, kv_heads=2, dtype=torch.float32, rows=CU[-1], n=N, views=2):
    shapes = ((rows, heads, D), (rows, kv_heads, D), (rows, kv_heads, D_v))
    shapes += ((n, kv_heads // views, D), (n, kv_heads // views, D_v), (n, kv_heads // views))
    return [normal(*s, dtype=dtype, seed=i) for i, s in enumerate((*shapes, (heads,)))]


def run_attend(x, impl="cpu"):
    return attend(*x[:5], READS, bias=x[5], sink=x[6], impl=impl)


def run_selected(x, impl="cpu"):
    return attend_selected(*x[:5], LISTS, READS, bias=x[5], sink=x[6], impl=impl)


def run_chunks(x, impl="cpu"):
    lists = LISTS.repeat(1, 2, 1)  # a list for each KV head, so for each view
    lists[:, 1] = lists[:, 1].flip(0)
    return attend_selected_chunks(*x[:3], lists, READS, sink=x[6], impl=impl)


def run_chunks_of_blocks(x, impl="cpu"):
    lists = LISTS[: -(-190 // 7) + -(-67 // 7)]
    return attend_selected_chunks(*x[:2], None, lists, READS, block=7, impl=impl)


def run_decode(x, impl="cpu"):
    names = ("q", "k", "v", "entry_k", "entry_v", "bias", "sink")
    return decode(**cached(dict(zip(names, x, strict=True)), READS, LAST, 5), impl=impl)


def run_pool(x, impl="cpu"):
    spans = Spans.of(VIEWS[0], overlap=True)
    return [pool(x[1], spans, gate=x[1].flip(0), slot_bias=x[1][:3], impl=impl)]


def run_pool_with_all_options(x, impl="cpu"):
    """Norm, RoPE, and tokens whose rows lie in another order, among others that hold NaN."""
    spans = Spans.of(VIEWS[0], overlap=True)
    rows = 2 * torch.arange(CU[-1]).flip(0) + 1
    values = x[1].new_full((2 * CU[-1] + 1, *x[1].shape[1:]), torch.nan).index_copy(0, rows, x[1])
    angles = normal(len(VIEWS[0]), 3, dtype=torch.float32)
    given = {"gate": values, "slot_bias": x[1][:3], "norm": x[1][0, 0, :12], "rows": rows}
    return [pool(values, spans, **given, rope=(angles.cos(), angles.sin()), impl=impl)]


def run_index(x, impl="cpu"):
    keys, weights = x[3][: len(VIEWS[0]), 0], x[0][:, :, 0]
    return index_topk(x[0], keys, weights, ONE_VIEW, 20, impl=impl)


def run_decode_topk(x, impl="cpu"):
    pages = torch.arange(7).flip(0).reshape(1, 1, 7)
    where = (pages, torch.tensor([0, 0]), torch.tensor([[49, 20]]))
    return decode_topk(x[0][:2], x[1][:49, 0].unflatten(0, (7, 7)), x[0][:2, :, 1], *where, 20,
                       impl=impl)  # fmt: skip


RUNS = {
    "attend": run_attend,
    "attend_selected": run_selected,
    "attend_selected_chunks": run_chunks,
    "attend_selected_chunks_of_blocks": run_chunks_of_blocks,
    "decode": run_decode,
    "pool": run_pool,
    "pool_with_all_options": run_pool_with_all_options,
    "index_topk": run_index,
    "decode_topk": run_decode_topk,
}
CHUNKS = (run_chunks, run_chunks_of_blocks)  # whose backward is the reference's
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
each_differentiable = pytest.mark.parametrize(
    "run", [RUNS[n] for n in RUNS if not n.startswith("decode")]
)


def with_gradients(run, x, impl="cpu"):
    """Outputs, and the gradients of a weighted sum of the finite numbers among them."""
    x = [t.detach().requires_grad_() for t in x]
    outs = [t for t in run(x, impl) if t.is_floating_point()]
    weights = [normal(*t.shape, dtype=torch.float32, seed=9).to(t.dtype) for t in outs]
    pairs = zip(outs, weights, strict=True)
    loss = sum((t.where(t.isfinite(), 0) * w).sum().to(torch.float64) for t, w in pairs)
    grads = torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)
    return [t.detach() for t in outs] + list(grads)


def assert_near(found, exact, dtype):
    """Compare finite numbers by relative RMS."""
    real = exact.isfinite()
    assert torch.equal(real, found.isfinite())
    error = (found.double() - exact)[real].norm() / exact[real].norm().clamp(min=1e-30)
    assert error <= (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@each_run
def test_equals_the_reference_in_float64(run, dtype):
    x = operands(dtype=dtype)
    for found, exact in zip(run(x), run([t.double() for t in x], "reference"), strict=True):
        if found.is_floating_point():
            assert_near(found, exact, dtype)
        else:
            assert torch.equal(found, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@each_differentiable
def test_gradients_equal_those_of_the_reference_in_float64(run, dtype):
    x = operands(dtype=dtype)
    found = with_gradients(run, x)
    exact = with_gradients(run, [t.double() for t in x], "reference")
    for a, b in zip(found, exact, strict=True):
        assert_near(a, b, dtype)


@pytest.mark.parametrize(("D", "D_v"), [(1, 1), (7, 33), (80, 96), (192, 16)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (14, 2), (64, 2)])
def test_any_width_and_any_number_of_heads(D, D_v, heads, kv_heads):
    x = operands(D, D_v, heads, kv_heads)
    for run in (run_attend, run_decode, run_selected, run_chunks):
        exact = run([t.double() for t in x], "reference")
        for found, expected in zip(run(x), exact, strict=True):
            assert_near(found, expected, torch.float32)


@few
@given(
    layouts(max_tokens=90, n_views=1),
    st.integers(0, 70),
    st.sampled_from(["window", "tail"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_attend_and_its_gradients_on_any_layout(chunks, window, cover, shared, group):
    if chunks.num_tokens == 0:
        return
    reads = Reads.of(chunks, window=window, cover=cover)
    x = operands(5, 3, 2 * group, 2, rows=chunks.num_tokens, n=len(chunks), views=1)
    if shared:
        x = [x[0], x[1], x[3], x[5], x[6]]

    def run(x, impl):
        q, k, *rest = x
        v, entry_k, entry_v = (None, rest[0], None) if shared else rest[:3]
        return attend(q, k, v, entry_k, entry_v, reads, bias=x[-2], sink=x[-1], impl=impl)

    exact = with_gradients(run, [t.double() for t in x], "reference")
    for a, b in zip(with_gradients(run, x), exact, strict=True):
        assert (a.double() - b).where(b.isfinite(), 0).norm() <= 1e-5 * max(
            1.0, float(b.where(b.isfinite(), 0).norm())
        )


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@each_run
def test_the_number_of_threads_changes_no_bit(run):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        forward_only = run in (run_decode, run_decode_topk, run_index, *CHUNKS)
        results.append(run(operands()) if forward_only else with_gradients(run, operands()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("_threads")
def test_two_python_threads_at_once():
    torch.set_num_threads(2)
    x = operands()
    expected = {name: run(x) for name, run in RUNS.items()}
    wrong = []

    def work(names):
        for name in names * 5:
            for a, b in zip(RUNS[name](x), expected[name], strict=True):
                if not torch.equal(a, b):
                    wrong.append(name)

    workers = [threading.Thread(target=work, args=(n,)) for n in (list(RUNS), list(RUNS)[::-1])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@each_run
def test_storages_may_still_be_resized(run):
    """FSDP frees and fills parameters that way."""
    x = operands()
    run(x)
    assert all(tensor.untyped_storage().resizable() for tensor in x)


def test_python_threads_do_the_same(monkeypatch):
    x = operands()
    expected = {name: run(x) for name, run in RUNS.items()}
    monkeypatch.setattr(loops, "team", lambda: None)
    for name, run in RUNS.items():
        for a, b in zip(run(x), expected[name], strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has an OpenMP of its own elsewhere")
def test_loops_run_on_torchs_own_threads():
    assert loops.team() is not None


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("own", [True, False], ids=["team", "python"])
def test_an_error_in_any_range_is_raised_when_all_threads_are_done(own, monkeypatch):
    torch.set_num_threads(2)
    if not own:
        monkeypatch.setattr(loops, "team", lambda: None)
    done = []

    def kernel(first, last):
        if 7 in range(first, last):
            raise IndexError("task 7")
        done.extend(range(first, last))

    with pytest.raises(IndexError, match="task 7"):
        loops.run(kernel, 64)
    done.clear()
    loops.run(kernel, 7)
    assert sorted(done) == list(range(7))


def test_works_after_a_fork():
    script = """
import os, torch
from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool
torch.set_num_threads(2)
x, spans = torch.randn(64, 8), Spans.of(Chunks.fixed(4, 64))
expected = pool(x, spans)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(pool(x, spans), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_p4_batch_mates_change_no_bit_forward_and_backward(dtype):
    lengths = (37, 100, 1)
    layouts_alone = [random_layout([0, n], seed=n) for n in lengths]
    starts = torch.cat([c.starts + sum(lengths[:i]) for i, c in enumerate(layouts_alone)])
    cu = np.cumsum([0, *lengths]).tolist()
    together = Chunks.from_boundaries([t for t in starts.tolist() if t not in cu], cu)
    counts = [len(c) for c in layouts_alone]
    x = operands(24, 16, 6, 2, dtype, rows=cu[-1], n=sum(counts), views=1)[:6]
    reads = Reads.of(together, window=20)
    whole = [t.clone().requires_grad_() for t in x]
    found = attend(*whole[:5], reads, bias=whole[5], impl="cpu")
    grads = torch.autograd.grad(found.out.sum(), whole)
    for b, alone in enumerate(layouts_alone):
        tokens, first = slice(cu[b], cu[b + 1]), sum(counts[:b])
        rows = [tokens] * 3 + [slice(first, first + counts[b])] * 3
        own = [t[part].clone().requires_grad_() for t, part in zip(x, rows, strict=True)]
        single = attend(*own[:5], Reads.of(alone, window=20), bias=own[5], impl="cpu")
        assert torch.equal(single.out, found.out[tokens])
        assert torch.equal(single.lse, found.lse[tokens])
        pairs = zip(torch.autograd.grad(single.out.sum(), own), grads, rows, strict=True)
        for mine, all_grads, part in pairs:
            assert torch.equal(mine, all_grads[part])


@few
@given(layouts(max_tokens=40), st.integers(0, 9), st.sampled_from([torch.nan, torch.inf]))
def test_p5_rows_that_no_query_reads_may_hold_anything_backward_too(chunks, window, poison):
    """The queries are the last tokens of all sequences."""
    cu_q = torch.nn.functional.pad(chunks.cu_seqlens.diff().clamp(max=1).cumsum(0), (1, 0))
    reads = Reads.of(chunks, window=window, cu_seqlens_q=cu_q.tolist())
    x = operands(5, 3, 4, 2, rows=chunks.num_tokens, n=len(chunks), views=1)[:6]
    x[0] = x[0][: int(cu_q[-1])]
    tokens = torch.zeros(chunks.num_tokens, dtype=torch.bool)
    entries = torch.zeros(len(chunks), dtype=torch.bool)
    for b in range(chunks.num_sequences):
        for t in range(int(cu_q[b]), int(cu_q[b + 1])):
            first = int(chunks.cu_chunks[b])
            tokens[int(reads.raw_start[0, t]) : int(chunks.cu_seqlens[b + 1])] = True
            entries[first : first + int(reads.n_visible[0, t])] = True
    poisoned = [x[0]]
    for y, kept in zip(x[1:], (tokens, tokens, entries, entries, entries), strict=True):
        poisoned.append(y.where(kept.reshape(-1, *[1] * (y.ndim - 1)), poison))

    def run(x, impl):
        return attend(*x[:5], reads, bias=x[5], impl=impl)

    for clean, dirty in zip(with_gradients(run, x), with_gradients(run, poisoned), strict=True):
        assert torch.equal(clean, dirty)


@each_run
def test_float64_is_refused(run):
    with pytest.raises(ValueError, match="impl: expected 'reference' for tensors of float64"):
        run([t.double() for t in operands()])


def test_what_is_not_there_is_an_error():
    names = ("q", "k", "v", "entry_k", "entry_v", "bias", "sink")
    given = cached(dict(zip(names, operands(), strict=True)), READS, LAST, 5)
    for name, value in (
        ("sequence", given["sequence"] + 9),
        ("n_visible", given["n_visible"] + 10_000),
        ("raw_end", given["raw_end"] + 10_000),
        ("pages", given["pages"] + 10_000),
        ("pages", given["pages"] - 10_000),
    ):
        with pytest.raises(IndexError, match=name):
            decode(**given | {name: value}, impl="cpu")


def test_decode_reads_views_of_a_cache_without_a_copy():
    rows = normal(2, 50, 3, 16, dtype=torch.float32)  # heads in front, as some caches have it
    k, v = rows[0].transpose(0, 1), rows[1].transpose(0, 1)  # [3, 50, 16]
    pages = normal(4, 2, 5, 3, 16, dtype=torch.float32)
    entry_k, entry_v = pages[:, 0].transpose(1, 2)[:, :, :5].transpose(1, 2), pages[:, 1]
    q, one = normal(1, 3, 16, dtype=torch.float32), torch.tensor([[3]])
    where = (torch.tensor([[[2, 0]]]), torch.tensor([0]), one * 3, one * 0, one[0])
    given = (q, k[:, :3].contiguous(), v[:, :3].contiguous(), entry_k, entry_v)
    strided = (q, k[:, :3], v[:, :3], entry_k, entry_v)
    assert not strided[1].is_contiguous()
    assert torch.equal(
        decode(*given, *where, impl="cpu").out, decode(*strided, *where, impl="cpu").out
    )


def test_exp2_is_right_to_one_unit_in_the_last_place():
    from numba import njit

    from dynchunk.ops.cpu._numeric import exp2, highest

    @njit
    def apply(x, out):
        for i in range(x.size):
            out[i] = exp2(x[i])

    x = np.linspace(-126, 0, 1_000_001).astype(np.float32)
    out = np.empty_like(x)
    apply(x, out)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(out - exact) <= np.spacing(exact.astype(np.float32))).all()
    special = np.array([-np.inf, -127, np.nan, 0], np.float32)
    apply(special, out)
    assert np.array_equal(out[:4], np.array([0, 0, np.nan, 1], np.float32), equal_nan=True)
    assert highest(np.array([-3, -np.inf, -1], np.float32)) == -1
    assert np.isnan(highest(np.array([1, np.nan, 2], np.float32)))


@few
@given(st.sets(st.integers(0, 2**64 - 1)), st.integers(0, 50), st.randoms())
def test_the_best_of_distinct_keys(keys, kept, random):
    from dynchunk.ops.cpu.index_topk import keep_best

    shuffled = np.array(random.sample(sorted(keys), len(keys)), np.uint64)
    keep_best(shuffled, kept)
    assert set(shuffled.tolist()) == keys
    assert sorted(shuffled[:kept].tolist()) == sorted(keys)[max(len(keys) - kept, 0) :]


def test_a_query_or_a_listed_value_that_is_not_finite_shows_and_nothing_else_does():
    """Query 100 is NaN, and one number of the first token's value and of the first entry's inf."""
    x = operands()
    x[0][100], x[2][0, 0, 0], x[4][0, 0, 0] = torch.nan, torch.inf, torch.inf
    for run in (run_attend, run_selected, run_chunks):
        found, exact = run(x), run([t.double() for t in x], "reference")
        for a, b in zip(found, exact, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert b.isnan().any()
            assert_near(a, b, torch.float32)
