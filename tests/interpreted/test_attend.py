from itertools import pairwise

import ops_oracle as oracle
import pytest
import torch
from guards import guarded_memory
from ops_oracle import normal, random_layout
from test_ops_attend import flat, operands, poison_all_but

from dynchunk.chunks import Chunks
from dynchunk.ops import attend as module
from dynchunk.ops.attend import attend
from dynchunk.ops.layout import Reads

NAMES = ("q", "k", "v", "entry_k", "entry_v", "bias", "sink")


def run(x, reads, impl="triton"):
    x = {name: x.get(name) for name in NAMES}
    return attend(*(x[n] for n in NAMES[:5]), reads, bias=x["bias"], sink=x["sink"], impl=impl)


def results(x, reads, impl="triton"):
    """Outputs, and gradients of all inputs for random gradients of both outputs."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    found = run(x, reads, impl)
    given = [normal(*t.shape, seed=7).to(t.dtype) for t in found]
    given[1] = given[1].where(found.lse.isfinite(), 0)
    return [*found, *torch.autograd.grad(found, list(x.values()), given)]


def check(x, reads):
    """Compare with float64, the outputs surrounded by guards and poisoned."""
    exact = results({name: t.double() for name, t in x.items()}, reads, "reference")
    dtype = x["q"].dtype
    with guarded_memory():
        found = results(x, reads)
    for name, a, b in zip(("out", "lse", *x), found, exact, strict=True):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), name
        a, b = a.where(finite, 0).double(), b.where(finite, 0)
        rms = 1e-5 if dtype == torch.float32 or name == "lse" else 5e-3
        assert (a - b).norm() <= rms * b.norm() + 1e-12, name
        if dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


CASES = {
    # tokens of each sequence, views, heads, kv heads, D, D_v (None: keys are values), window, cover
    "small": ([23, 0, 9], 1, 4, 2, 16, 24, 7, "window"),
    "T1": ([1], 1, 4, 2, 16, 16, 3, "window"),
    "T63-group-of-three": ([63, 0, 48], 1, 6, 2, 16, 32, 7, "window"),
    "T111-D80-two-views": ([1, 69, 0, 41], 2, 4, 2, 80, None, 9, "tail"),
    "T257-one-head": ([257], 1, 1, 1, 16, 16, 40, "window"),
    "T130-tail-no-window": ([0, 130], 1, 2, 1, 16, 16, 0, "tail"),
    "many-heads-one-kv-head": ([7, 2], 1, 64, 1, 32, None, 4, "window"),
    "no-raw-tokens": ([33], 1, 2, 1, 16, 24, 0, "window"),
    "D512-tiles-of-eight-keys": ([9, 5], 1, 2, 1, 512, None, 5, "window"),
    "long-window": ([120], 1, 2, 2, 16, 16, 100, "window"),
}


def make(name, dtype=torch.float32):
    sizes, n_views, heads, kv_heads, D, D_v, window, cover = CASES[name]
    cu = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    views = [random_layout(cu, 4, seed) for seed in range(n_views)]
    x = operands(views, heads, kv_heads, D, D_v or D, shared=D_v is None, dtype=dtype)
    return flat(x), Reads.of(views, window=window, cover=cover)


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    check(*make(name))


@pytest.mark.parametrize("name", ["small", "T111-D80-two-views"])
def test_equals_float64_in_bfloat16(name):
    check(*make(name, torch.bfloat16))


@pytest.mark.parametrize("dropped", [["bias"], ["sink"], ["bias", "sink"]])
def test_without_bias_or_sink(dropped):
    x, reads = make("small")
    check({name: t for name, t in x.items() if name not in dropped}, reads)


def test_chunks_of_1_to_40():
    lengths = [40, 1, 1, 39, 7, 1, 33, 2]
    chunks = Chunks.from_lengths(lengths)
    check(flat(operands([chunks], 4, 2, 16, 16, dtype=torch.float32)), Reads.of(chunks, window=5))


def test_no_entry_is_closed_yet():
    chunks = Chunks.from_boundaries([], [0, 20, 20, 23], close_last=False)
    check(flat(operands([chunks], 4, 2, 16, 16, dtype=torch.float32)), Reads.of(chunks, window=5))


def test_the_last_queries_of_each_sequence():
    chunks = random_layout([0, 70, 75, 75, 130])
    cu_q = [0, 9, 9, 9, 40]
    reads = Reads.of(chunks, window=6, cu_seqlens_q=cu_q)
    x = flat(operands([chunks], 4, 2, 16, 16, dtype=torch.float32))
    x["q"] = x["q"][: cu_q[-1]]
    check(x, reads)


def test_any_layout_of_the_operands():
    x, reads = make("small")
    strided = dict(x)
    for name in ("q", "k", "entry_v"):
        strided[name] = x[name].transpose(0, 1).contiguous().transpose(0, 1)
    strided["v"] = torch.cat([x["v"], x["v"]], -1)[..., : x["v"].shape[-1]]
    strided["entry_k"] = x["entry_k"].transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(results(x, reads), results(strided, reads), strict=True):
        assert torch.equal(a, b)


def test_layout_tensors_may_be_int32():
    x, reads = make("small")
    narrow = Reads(*(t.int() for t in reads))
    assert all(
        torch.equal(a, b) for a, b in zip(results(x, reads), results(x, narrow), strict=True)
    )


def test_operands_of_several_dtypes():
    x, reads = make("T1")
    mixed = x | {"k": x["k"].bfloat16(), "bias": x["bias"].half()}
    for a, b in zip(results(mixed, reads), results(mixed, reads, "reference"), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_p5_p6_rows_that_a_query_does_not_read_may_hold_anything(poison, shared):
    chunks = random_layout([0, 37, 60])
    reads = Reads.of(chunks, window=5)
    x = flat(operands([chunks], 4, 2, 16, 16, shared=shared, dtype=torch.float32))
    clean = run(x, reads)
    for t in (0, 36, 50):
        read = oracle.entries_and_tokens(chunks, t, 5, "window")
        poisoned = run(poison_all_but(x, poison, *read), reads)
        assert torch.equal(clean.out[t], poisoned.out[t])
        assert torch.equal(clean.lse[t], poisoned.lse[t])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_p5_rows_that_no_query_reads_change_no_gradient(poison):
    chunks = random_layout([0, 37, 60])
    last = [end - 1 for _, end in pairwise(chunks.cu_seqlens.tolist())]
    reads = Reads.of(chunks, window=5, cu_seqlens_q=[0, 1, 2])
    x = flat(operands([chunks], 4, 2, 16, 16, dtype=torch.float32))
    x["q"] = x["q"][last]
    read = [oracle.entries_and_tokens(chunks, t, 5, "window") for t in last]
    poisoned = poison_all_but(x, poison, *([i for r in read for i in r[n]] for n in (0, 1)))
    for a, b in zip(results(x, reads), results(poisoned, reads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shared", [False, True])
def test_a_value_that_is_not_finite_reaches_whoever_reads_it(shared):
    chunks = Chunks.fixed(2, 70)
    x = flat(operands([chunks], 2, 1, 16, 16, shared=shared, dtype=torch.float32))
    x["k" if shared else "v"][50, 0, 1] = torch.inf
    out = run(x, Reads.of(chunks, window=2)).out
    bad = ~out.isfinite().all(-1).all(-1)
    assert bad.nonzero().flatten().tolist() == [50, 51]


def test_a_query_that_sees_nothing_returns_zero():
    chunks = Chunks.fixed(4, 6)
    x = flat(operands([chunks], 2, 1, 16, 16, dtype=torch.float32))
    del x["bias"], x["sink"]
    found = run(x, Reads.of(chunks, window=0))
    assert not found.out[:3].any()
    assert (found.lse[:3] == -torch.inf).all()
    x["sink"] = torch.tensor([0.5, -torch.inf])
    found = run(x, Reads.of(chunks, window=0))
    assert not found.out[:3].any()
    assert (found.lse[:3, 0] == 0.5).all()
    assert (found.lse[:3, 1] == -torch.inf).all()


def test_a_bias_of_minus_infinity_hides_an_entry():
    x, reads = make("small")
    x["bias"][::2] = -torch.inf
    check(x, reads)


def test_p4_a_batch_changes_no_bit():
    chunks = random_layout([0, 5, 75, 75, 111])
    x = operands([chunks], 4, 2, 16, 16, dtype=torch.float32)
    batch = run(flat(x), Reads.of(chunks, window=6))
    for b in range(chunks.num_sequences):
        tokens, rows = (
            slice(*cu[b : b + 2].tolist()) for cu in (chunks.cu_seqlens, chunks.cu_chunks)
        )
        alone = x | {n: x[n][tokens] for n in ("q", "k", "v")}
        alone |= {n: [x[n][0][rows]] for n in ("entry_k", "entry_v", "bias")}
        one = run(flat(alone), Reads.of(chunks.sequence(b), window=6))
        assert torch.equal(one.out, batch.out[tokens])
        assert torch.equal(one.lse, batch.lse[tokens])


def test_gradients_are_the_same_every_time():
    x, reads = make("small")
    for a, b in zip(results(x, reads), results(x, reads), strict=True):
        assert torch.equal(a, b)


def test_case_22_no_query_and_no_token():
    chunks = Chunks.fixed(3, [0, 0, 4, 4])
    x = flat(operands([chunks], 2, 1, 16, 16, dtype=torch.float32))
    reads = Reads.of(chunks, window=2, cu_seqlens_q=[0, 0, 0, 0])
    check(x | {"q": x["q"][:0]}, reads)
    empty = Chunks.fixed(3, [0, 0])
    check(flat(operands([empty], 2, 1, 16, 16, dtype=torch.float32)), Reads.of(empty, window=2))


def test_float64_is_refused():
    x, reads = make("T1")
    with pytest.raises(ValueError, match=r"impl: expected 'reference' .* for float64"):
        run({name: t.double() for name, t in x.items()}, reads)


def test_opcheck(monkeypatch):
    given = []

    def record(impl, ops, *operands):
        return lambda *args: given.append(args) or ops["reference"](*args)

    x, reads = make("small")
    with monkeypatch.context() as patch:
        patch.setattr(module, "choose", record)
        run({name: t[..., :].detach().requires_grad_() for name, t in x.items()}, reads)
    torch.library.opcheck(module.OPS["triton"](), given[0])
