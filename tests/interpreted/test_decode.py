import pytest
import torch
from guards import guarded_memory
from ops_oracle import normal, random_layout
from paged import cached
from test_ops_decode import drop_unlisted, exact, operands, random_lists

from dynchunk.ops import decode as module
from dynchunk.ops.decode import decode
from dynchunk.ops.layout import Reads


def check(found, expected, dtype):
    for a, b, own in zip(found, expected, (dtype, torch.float32), strict=True):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite)
        a, b = a.where(finite, 0).double(), b.where(finite, 0)
        assert (a - b).norm() <= (1e-5 if own == torch.float32 else 5e-3) * b.norm()
        if own == torch.float32:
            assert (a - b).abs().max() <= 1e-4 * max(b.abs().max(), 1.0)


CASES = {
    # tokens of each sequence, views, heads, kv heads, D, D_v (None: keys are values), window,
    # rows of a page, heads of the lists (None: all entries)
    "T1": ([1], 1, 2, 1, 16, 16, 3, 4, None),
    "group-of-three": ([63, 0, 48], 1, 6, 2, 16, 32, 7, 7, None),
    "D80-two-views": ([1, 69, 0, 130], 2, 4, 2, 80, None, 9, 3, None),
    "many-heads-one-kv-head": ([90], 1, 96, 1, 16, None, 20, 16, None),
    "more-entries-than-a-part": ([2600], 1, 2, 1, 16, 16, 5, 64, None),
    "long-window": ([700], 1, 2, 1, 16, 16, 600, 16, None),
    "one-list": ([63, 0, 111], 1, 4, 2, 16, 16, 7, 5, 1),
    "lists-of-kv-heads-and-views": ([63, 0, 111], 2, 8, 4, 16, None, 7, 5, 4),
}


def make(name, dtype=torch.float32, seed=0, length=70):
    sizes, n_views, heads, kv_heads, D, D_v, window, page_size, list_heads = CASES[name]
    cu = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    views = [random_layout(cu, 4, seed) for seed in range(n_views)]
    x = operands(views, heads, kv_heads, D, D_v, dtype)
    reads = Reads.of(views, window=window)
    at = torch.tensor(sorted({end - 1 for end in cu[1:] if end} | {cu[-1] // 2, cu[-1] // 3}))
    lists = None if list_heads is None else random_lists(cu[-1], list_heads, length, 30)
    given = cached(x, reads, at, page_size, seed)
    return given | {"indices": None if lists is None else lists[at]}, exact(x, reads, at, lists)


def run(given, impl="triton"):
    return decode(**given, impl=impl)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_attends(name):
    given, expected = make(name)
    with guarded_memory():
        found = run(given)
    check(found, expected, torch.float32)


@pytest.mark.parametrize("name", ["group-of-three", "D80-two-views", "one-list"])
def test_equals_the_attends_in_bfloat16(name):
    given, expected = make(name, torch.bfloat16)
    check(run(given), expected, torch.bfloat16)


@pytest.mark.parametrize("dropped", [["bias"], ["sink"], ["bias", "sink"]])
def test_without_bias_or_sink(dropped):
    given, _ = make("group-of-three")
    given |= dict.fromkeys(dropped)
    check(run(given), run(given, "reference"), torch.float32)


def test_integers_of_32_bits_and_operands_of_any_layout():
    given, _ = make("lists-of-kv-heads-and-views")
    other = {}
    for name, x in given.items():
        if x is None:
            other[name] = None
        elif not x.is_floating_point():
            other[name] = x.int()
        elif name in ("q", "k", "entry_k"):
            other[name] = x.transpose(-2, -3).contiguous().transpose(-2, -3)
        else:
            other[name] = x
    for a, b in zip(run(given), run(other), strict=True):
        assert torch.equal(a, b)


def test_p5_entries_in_no_list_may_hold_anything():
    given, _ = make("one-list", length=6)
    lists = given["indices"]
    poisoned = drop_unlisted(given, lists) | {"indices": lists}
    for a, b in zip(run(given), run(poisoned), strict=True):
        assert torch.equal(a, b)


def test_p5_a_query_that_reads_nothing_gets_zero():
    given, _ = make("group-of-three")
    given["raw_begin"] = given["raw_end"][None] + 1
    given["n_visible"] = given["n_visible"] * 0
    given["pages"] = given["pages"] * 0 - 1
    given["sink"] = None
    found = run(given)
    assert not found.out.any()
    assert (found.lse == -torch.inf).all()
    given["sink"] = normal(6, dtype=torch.float32)
    assert torch.equal(run(given).lse, given["sink"].expand_as(found.lse))


def test_a_query_that_reads_nan_gets_nan():
    given, _ = make("group-of-three")
    for name in ("k", "v"):
        bad = given | {name: given[name].clone()}
        bad[name][given["raw_end"][-1] - 1] = torch.nan
        out = run(bad).out
        assert out[-1].isnan().all()
        assert out[0].isfinite().all()


def test_there_may_be_no_query_and_an_empty_list():
    given, _ = make("one-list")
    nothing = {n: given[n][:0] for n in ("q", "sequence", "raw_end", "indices")}
    nothing |= {n: given[n][:, :0] for n in ("n_visible", "raw_begin")}
    assert run(given | nothing).out.shape == (0, 4, 16)
    empty = given | {"indices": given["indices"][..., :0]}
    check(run(empty), run(empty, "reference"), torch.float32)


@pytest.mark.parametrize("name", ["group-of-three", "one-list"])
def test_case_13_pages_that_others_have_used(name):
    """Free pages hold what others left there, or NaN, and come back in another order."""
    fresh, _ = make(name)
    found = run(fresh)
    again, _ = make(name, seed=1)
    for field in ("entry_k", "entry_v", "bias"):
        stale = fresh[field][: len(again[field])]
        again[field] = again[field].where(again[field].isfinite(), stale.nan_to_num(1e9))
    for a, b in zip(found, run(again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["group-of-three", "lists-of-kv-heads-and-views"])
def test_case_24_a_batch_changes_no_bit(name):
    given, _ = make(name)
    found = run(given)
    order = torch.arange(len(given["q"])).flip(0)
    for rows in (order, *order[:, None]):
        alone = {n: given[n][rows] for n in ("q", "sequence", "raw_end")}
        alone |= {n: given[n][:, rows] for n in ("n_visible", "raw_begin")}
        alone["indices"] = None if given["indices"] is None else given["indices"][rows]
        needed = -(-int(alone["n_visible"].max()) // given["entry_k"].shape[1])
        alone["pages"] = given["pages"][..., : max(needed, 1)]
        one = run(given | alone)
        assert torch.equal(one.out, found.out[rows])
        assert torch.equal(one.lse, found.lse[rows])


def test_case_22_lists_of_one_and_longer_than_the_entries():
    for length in (1, 40):
        given, expected = make("one-list", length=length)
        check(run(given), expected, torch.float32)


def test_opcheck(monkeypatch):
    given = []

    def record(impl, ops, *operands):
        return lambda *args: given.append(args) or ops["reference"](*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "choose", record)
        run(make("one-list")[0])
    torch.library.opcheck(module.OPS["triton"](), given[0])
