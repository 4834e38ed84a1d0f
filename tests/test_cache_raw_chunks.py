"""Caches that keep raw chunks, all or some, against loops over tokens."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_chunks import Stream, assert_same, normal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dynchunk.attention import All, Evict, Quest, chunk_kv, full, quest
from dynchunk.boundaries import BoundaryRule, FixedStride
from dynchunk.cache import Cache
from dynchunk.cache.rows import FEW
from dynchunk.chunks import Chunks

LONG = FEW + 1  # a part of a prompt
CONTENT = BoundaryRule(1, min_length=1, max_length=7)


GRID = FixedStride(4)


def select(boundaries=GRID, window=6, **options):
    return replace(quest(boundaries, window=window), selection=Quest(**options))


def evict(boundaries=GRID, window=6, **options):
    return replace(chunk_kv(boundaries, window=window), reduction=Evict(**options))


POLICIES = {
    "quest": select(share=0.25),
    "quest-bound": select(CONTENT, share=0.5, normalise=False),
    "quest-k": select(CONTENT, share=None, k=5, first=1),
    "quest-nothing": select(share=None, k=0, first=0, window=1),
    "raw": replace(select(), selection=All()),
    "evict": evict(ratio=3.0, observe=5, first=4),
    "evict-content": evict(CONTENT, ratio=2.5, observe=4, first=0),
    "evict-summed": evict(CONTENT, ratio=4.0, observe=7, first=3, per_token=False),
    "evict-tokens": evict(FixedStride(1), ratio=4.0, observe=3, window=2),
}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
evicting = pytest.mark.parametrize(
    "policy", [p for p in POLICIES.values() if isinstance(p.reduction, Evict)]
)


def stream(policy, n=60, rows=1, heads=(4, 2), sink=False, page_size=3, seed=0, **options):
    cache = Cache(policy, rows, page_size=page_size)
    scores = None
    if isinstance(policy.boundaries, BoundaryRule):
        scores = normal(rows, n, seed=seed)
        chunks = policy.boundaries(scores.flatten(), [n * b for b in range(rows + 1)])
    else:
        chunks = Chunks.fixed(policy.boundaries.stride, [n * b for b in range(rows + 1)])
    sinks = normal(heads[0], seed=9) if sink else None
    return Stream(cache, chunks, heads, scores, sinks, seed, **options)


def poison(cache):
    """Put NaN wherever nothing may be read."""
    for i, layer in enumerate(cache.layers):
        layout = cache.layout(i)
        for name, buffers in layer.buffers.items():
            held = torch.from_numpy(layout.maps[name].rows())
            for x in buffers.values():
                _poison(x, held)
        tables = [(layout.table, layout.entries, layer.entries)]
        if hasattr(layout, "bounds"):
            tables.append((layout.bounds, partial(_closed, layout), layer.bounds))
        if getattr(layer, "kept", None) is not None:
            tables.append((layer.kept.table, layer.kept.count, layer.kept.rows))
        for table, count, tensors in tables:
            rows = [
                table.rows(g, b, 0, count(g, b))
                for g, of in enumerate(table.held)
                for b in range(len(of))
            ]
            for x in tensors.values():
                _poison(x.flatten(0, 1), torch.from_numpy(np.concatenate(rows)))
    return cache


def _closed(layout, g, b):
    return len(layout.closings(g, b))


def _poison(x, kept):
    saved = x[kept].clone()
    x.fill_(torch.nan)
    x[kept] = saved


# What is read


@policies
@pytest.mark.parametrize(("heads", "sink"), [((4, 2), True), ((3, 3), False), ((3, 1), True)])
def test_prompt_then_tokens(policy, heads, sink):
    one = stream(policy, heads=heads, sink=sink)
    for count in (LONG, LONG, 1, 1, 1, 5, 1, 1, 1, 1, 3, 1):
        poison(one.cache)
        one.check([count])


@policies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_dtype(policy, dtype):
    one = stream(policy, dtype=dtype)
    for count in (40, 1, 1, 5, LONG - 5, 1):
        poison(one.cache)
        one.check([count])
    assert all(x.dtype == dtype for x in one.cache.layers[0].tensors() if x.is_floating_point())


@policies
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_rows_of_a_ragged_batch_in_any_pieces(policy, data):
    one = stream(policy, n=50, rows=3, seed=data.draw(st.integers(0, 99)))
    sizes = st.sampled_from([0, 0, 1, 1, 2, 5, FEW, LONG, LONG + 3])
    for _ in range(6):
        counts = data.draw(st.tuples(sizes, sizes, sizes))
        counts = [min(c, 50 - n) for c, n in zip(counts, one.cache.lengths, strict=True)]
        if sum(counts):
            poison(one.cache)
            one.check(counts)


@policies
def test_any_parts_of_a_prompt_give_the_same(policy):
    outs = []
    for parts in ([54], [LONG, 37], [LONG, LONG, 20]):
        one = stream(policy)
        for count in parts:
            one.feed([count])
        outs.append(torch.cat([one.feed([1]) for _ in range(6)]))
    assert_same(outs[1], outs[0])
    assert_same(outs[2], outs[0])


@pytest.mark.parametrize(
    "policy", [select(share=1.0), evict(CONTENT, ratio=1.0, observe=2), evict(window=99)], ids=str
)
def test_what_keeps_everything_is_full_attention(policy):
    one, plain = stream(policy), stream(evict(window=999))
    for count in (LONG, LONG, 1, 4, 1, 1, 1):
        assert_same(one.feed([count]), plain.feed([count]))


@policies
def test_no_new_tokens(policy):
    one = stream(policy)
    for count in (0, 40, 0, 1, 0):
        assert len(one.feed([count])) == count
        one.cache.check()


def test_a_query_reads_no_other_token():
    one = stream(select(share=0.2, window=3, first=2), heads=(2, 1))
    one.feed([50])
    expected = one.feed([1])
    read = {int(t) for t in one.cache.layers[0]._last[2].flatten() if t >= 0}
    assert {0, 1, 48, 49, 50} <= read
    assert len(read) < 40
    again = stream(select(share=0.2, window=3, first=2), heads=(2, 1))
    again.feed([50])
    layer, table = again.cache.layers[0], again.cache.layout(0).table
    others = [t for t in range(50) if t not in read]
    for x in layer.entries.values():
        x.flatten(0, 1)[torch.from_numpy(table.rows(0, 0, 0, 50))[others]] = torch.nan
    assert torch.equal(again.feed([1]), expected)


def test_equal_scores_keep_the_first_chunks():
    for policy in (select(share=0.5, first=0, window=4), evict(observe=1, first=0, window=4)):
        one = stream(policy, heads=(1, 1))
        one.k[:] = 1.0
        one.loops[0].k[:] = 1.0
        one.check([40])
        one.check([1])


# Going back, other rows, files


@evicting
def test_crop_not_behind_the_last_eviction(policy):
    one = stream(policy, n=70)
    for count in (40, 1, 2):
        one.check([count])
    assert one.cache.croppable == (40,)
    for least in (39, 1):
        with pytest.raises(ValueError, match=r"go back to 40 \(chunks were evicted then\), or to"):
            one.cache.crop(least)
    assert one.cache.check().lengths == (43,)
    one.cache.crop(41)
    one.loops[0].crop(41)
    for count in (1, 1, 3, LONG, 1):
        poison(one.cache)
        one.check([count])


@policies
def test_crop_of_tokens_after_an_eviction_or_a_prompt(policy):
    one = stream(policy)
    for drop, count in ((5, 30), (1, 3), (2, 4), (0, 2)):
        one.check([count])
        n = max(one.cache.lengths[0] - drop, one.cache.croppable[0])
        poison(one.cache).crop(n)
        one.cache.check()
        one.loops[0].crop(n)
    one.check([1])


@policies
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_operations_then_tokens(policy, data, tmp_path_factory):
    rows = data.draw(st.integers(1, 2))
    one = stream(policy, n=45, rows=rows, seed=data.draw(st.integers(0, 99)))
    one.cache.rollback = 6
    steps = st.sampled_from(["feed", "feed", "feed", "crop", "select", "fork", "save"])
    for step in ["feed", *data.draw(st.lists(steps, min_size=4, max_size=9)), "feed"]:
        lengths, batch = one.cache.lengths, range(one.cache.batch)
        if step == "feed":
            counts = [data.draw(st.sampled_from([0, 1, 1, 3, LONG])) for _ in batch]
            counts = [min(c, 45 - n) for c, n in zip(counts, lengths, strict=True)]
            if sum(counts):
                poison(one.cache)
                one.check(counts)
        elif step == "crop":
            least = one.cache.croppable
            to = [data.draw(st.integers(a, n)) for a, n in zip(least, lengths, strict=True)]
            one.crop([0 if data.draw(st.integers(0, 9)) == 0 else n for n in to])
        elif step == "select":
            chosen = st.lists(st.sampled_from(batch), min_size=1, max_size=3)
            one.select(data.draw(chosen))
        elif step == "fork":
            other = one.cache.fork()
            poison(one.cache.check()).reset()
            one.cache = other
        else:
            path = tmp_path_factory.mktemp("caches") / "cache"
            one.cache.save(path)
            one.cache = Cache.load(path, policy)
        one.cache.check()


@policies
def test_crop_to_nothing_and_reset(policy):
    one, fresh = stream(policy, rows=2), stream(policy, rows=2)
    for count in (40, 1, 1):
        one.feed([count, count])
    one.cache.crop([0, 500])
    assert one.cache.check().lengths == (0, 42)
    one.cache.reset()
    assert one.cache.nbytes == Cache(policy, 2, page_size=3).nbytes
    for counts in ([LONG, 2], [1, LONG], [2, 1]):
        assert_same(one.feed(counts), fresh.feed(counts))


@policies
def test_select_repeat_fork_save_and_load(policy, tmp_path):
    one = stream(policy, rows=3)
    for counts in ([30, LONG, 20], [1, 0, 2], [1, 1, 1]):
        one.feed(counts)
    cache = poison(one.cache)
    forked = cache.fork()
    cache.save(tmp_path / "cache")
    loaded = Cache.load(tmp_path / "cache", policy)
    counts = [1, LONG, 3]
    expected = one.feed(counts).split(counts)
    for other in (forked, loaded):
        assert other.check().lengths == (32, LONG + 1, 23)
        one.cache = other
        assert_same(one.feed(counts), torch.cat(expected))
    # Rows in another order, one twice, that go on as before.
    one = stream(policy, rows=3)
    for counts in ([30, LONG, 20], [1, 0, 2], [1, 1, 1]):
        one.feed(counts)
    order = [2, 0, 0, 1]
    one.select(order)
    poison(one.cache).check()
    counts = [3, 1, 1, LONG]
    for row, b in zip(one.feed(counts).split(counts), order, strict=True):
        assert_same(row, expected[b])
    one.cache.select([3])
    assert one.cache.check().lengths == (2 * LONG + 1,)


def test_a_file_without_a_part_is_an_error(tmp_path):
    for policy in (POLICIES["evict"], POLICIES["quest"]):
        one = stream(policy)
        one.feed([40])
        one.feed([1])
        one.cache.save(tmp_path / "whole")
        tensors = load_file(tmp_path / "whole")
        with safe_open(tmp_path / "whole", "pt") as file:
            metadata = file.metadata()
        own = [name for name in tensors if ".own." in name]
        assert len(own) >= 2
        for name in own:
            rest = {key: x for key, x in tensors.items() if key != name}
            save_file(rest, tmp_path / "part", metadata)
            with pytest.raises(ValueError, match="lacks"):
                Cache.load(tmp_path / "part", policy)


# Bytes


def bytes_of(policy, n, dtype=torch.float32, heads=(9, 3), D=16):
    cache = Cache(policy)
    scores = normal(n, seed=1)
    for begin, end in ((0, n - 40), *((i, i + 1) for i in range(n - 40, n))):
        given = scores[begin:end] if isinstance(policy.boundaries, BoundaryRule) else ()
        cache.append(end - begin, given)
        q, k, v = (normal(end - begin, h, D, seed=end).to(dtype) for h in (*heads, heads[1]))
        cache.layers[0].mix(q, k, v)
    return cache.check()


def test_cases_34_and_36_bytes_held_by_storages_at_4096_tokens():
    whole = bytes_of(full(rope=None), 4096)
    row = 2 * 3 * 16 * 4
    assert whole.nbytes < 1.1 * 4096 * row  # three KV heads, not nine
    for rule in (FixedStride(8), BoundaryRule(1, max_length=12)):
        evicted = bytes_of(chunk_kv(rule), 4096)
        assert evicted.nbytes <= 0.34 * 4096 * row  # of one small layer; see below for 30
        assert evicted.logical_nbytes <= 0.29 * 4096 * row
        assert evicted.lengths == (4096,)
        assert evicted.physical_lengths(0)[0] < 0.3 * 4096


def test_decode_does_not_grow_at_ratio_1():
    policy = evict(ratio=4.0, observe=8, window=8)
    cache = Cache(policy, page_size=4)
    sizes = []
    for i in range(400):
        cache.append(1)
        x = normal(1, 1, 4, seed=i)
        cache.layers[0].mix(x, x, x)
        sizes.append(cache.physical_lengths(0)[0])
    assert sizes[399] - sizes[199] <= 200 / 4 + 8
    assert cache.check().lengths == (400,)


def test_read_bytes_are_counted():
    n, row = 1024, 2 * 16 * 4
    whole = bytes_of(full(rope=None), n)
    assert whole.read_nbytes == n * 3 * row
    one_each = bytes_of(quest(FixedStride(4), share=1 / 8), n, heads=(3, 3))
    far = n - 64  # a query's chunks end before its window
    chunks = (far + 1) // 4
    read = 4 + int((4 * chunks - 4) / 8) // 4 * 4 + n - 4 * chunks
    assert one_each.read_nbytes == 3 * (row * read + chunks * row)
    grouped = bytes_of(quest(FixedStride(4), share=1 / 8), n)
    assert one_each.read_nbytes < grouped.read_nbytes < 3 * one_each.read_nbytes
    evicted = bytes_of(chunk_kv(FixedStride(4)), n)
    assert evicted.read_nbytes < 0.4 * whole.read_nbytes


# Errors


def test_what_cannot_be_meant():
    with pytest.raises(ValueError, match="rollback: expected a number of tokens"):
        Cache(POLICIES["evict"], rollback=None)
    Cache(POLICIES["quest"], rollback=None)
