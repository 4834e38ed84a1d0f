"""The streaming cache: the field's cases, what it holds, files, errors."""

import os
import signal
import subprocess
import sys
from itertools import combinations, pairwise

import attention_oracle as oracle
import pytest
import torch
from attention_oracle import HEADS, POLICIES, VOCAB
from ops_oracle import assert_close
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_cache_machine import MODELS, expected_logits
from torch.utils._python_dispatch import TorchDispatchMode

from dynchunk.attention import (
    AsScored,
    ChunkedAttention,
    ChunkedTransformer,
    MeanPool,
    ModelConfig,
    Policy,
    Shifted,
)
from dynchunk.attention.deepseek_v4 import V4Attention, V4Sizes
from dynchunk.boundaries import BoundaryRule, FixedStride
from dynchunk.cache import Cache
from dynchunk.cache.closings import Closings, follow
from dynchunk.cache.rows import FEW
from dynchunk.chunks import Chunks, InvariantError
from dynchunk.ops.decode_topk import decode_topk
from dynchunk.ops.pool import pool

policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def ids(*shape, seed=0, vocab=VOCAB):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def build(policy, layers=2, dtype=torch.float64, **options):
    options = {"shared_kv": True, "slopes": True} | options
    config = ModelConfig(VOCAB, 8, layers, 2, 1, 8, 12, pattern=(policy,), **options)
    torch.manual_seed(0)
    return oracle.randomise(ChunkedTransformer(config)).to(dtype)


def stream(model, tokens, sizes, cache=None):
    """Logits of one sequence in pieces of these sizes."""
    cache = Cache.of(model.config) if cache is None else cache
    pieces = tokens.split(list(sizes))
    return torch.cat([model(piece, cache=poison(cache).check()).logits for piece in pieces])


def poison(cache):
    """Put NaN wherever nothing may be read: free pages, ends of pages, rows that are not held."""
    for i, layer in enumerate(cache.layers):
        layout = cache.layout(i)
        for x in layer.rows.values():
            fill_others(x, layout.map.rows())
        pool = layout.table.pool
        for x in layer.entries.values():
            x[pool.free] = torch.nan
            for g, of_view in enumerate(layout.table.held):
                for b, pages in enumerate(of_view):
                    used = layout.entries(g, b) % pool.page_size
                    if used and pool.references[pages[-1]] == 1:
                        x[pages[-1], used:] = torch.nan
    return cache


def fill_others(x, rows):
    kept = x[torch.from_numpy(rows)].clone()
    x.fill_(torch.nan)
    x[torch.from_numpy(rows)] = kept


def go_on(model, cache, histories, sizes=(1, 2, 6)):
    """Append other tokens to all sequences, and compare with runs from scratch."""
    histories = [tokens.tolist() for tokens in histories]
    for step, n in enumerate(sizes):
        more = ids(len(histories), n, seed=100 + step)
        got = model(more, cache=poison(cache).check()).logits
        histories = [old + new for old, new in zip(histories, more.tolist(), strict=True)]
        assert_close(got.flatten(0, 1), expected_logits(model, histories, [n] * len(histories)))


# P3: any split of a prompt is one shot


@policies
def test_token_by_token_and_in_pieces_equals_one_shot(policy):
    model, tokens = build(policy), ids(70)
    whole = model(tokens).logits
    for sizes in ([1] * 70, [70], [FEW + 4, 1, 1, 48], [3, 0, 17, 1, 29, 20]):
        assert_close(stream(model, tokens, sizes), whole)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@policies
def test_any_heads(policy, heads):
    queries, kv_heads, shared_kv = heads
    config = ModelConfig(
        VOCAB, 8, 2, queries, kv_heads, 8, 12, pattern=(policy,), shared_kv=shared_kv
    )
    model, tokens = oracle.randomise(ChunkedTransformer(config)).double(), ids(40)
    sizes = [20, *[1] * 10, 5, 5]
    assert_close(stream(model, tokens, sizes), model(tokens).logits)


@models
def test_case_3_a_prompt_in_two_or_three_pieces(name):
    model, tokens = MODELS[name](), ids(13)
    whole = model(tokens).logits
    for first in range(1, 13):
        assert_close(stream(model, tokens, [first, 13 - first]), whole)
    # Every pair of positions is a sequence of one batch.
    cuts = torch.tensor([(0, *pair, 13) for pair in combinations(range(1, 13), 2)])
    cache = Cache.of(model.config, len(cuts))
    for begin, end in pairwise(cuts.T.tolist()):
        pieces = [torch.arange(a, b) for a, b in zip(begin, end, strict=True)]
        cu = torch.tensor([0, *map(len, pieces)]).cumsum(0)
        got = model(tokens[torch.cat(pieces)], cu, cache=poison(cache)).logits
        assert_close(got, whole[torch.cat(pieces)])


@models
def test_rows_of_a_ragged_batch_and_padding_equal_each_alone(name):
    model, rows = MODELS[name](), [ids(n, seed=n) for n in (30, 7, 0, 19)]
    cache = Cache.of(model.config, 4)
    got = [[] for _ in rows]
    at = [0] * 4
    for step in range(6):
        counts = [
            min((step * (b + 3)) % 8 + 3 * (b == 0), len(r) - at[b]) for b, r in enumerate(rows)
        ]
        width = max(counts)
        tokens = torch.full((4, width), 10**9)  # no such token
        mask = torch.zeros(4, width, dtype=torch.bool)
        for b, n in enumerate(counts):
            tokens[b, width - n :], mask[b, width - n :] = rows[b][at[b] : at[b] + n], True
            at[b] += n
        logits = model(tokens, mask=mask, cache=poison(cache)).logits
        for b in range(4):
            got[b].append(logits[b][mask[b]])
    assert cache.check().lengths == tuple(at)
    assert at[1] == 7
    for b, row in enumerate(rows):
        if at[b]:
            assert_close(torch.cat(got[b]), model(row[: at[b]]).logits)


@models
def test_last_gives_the_last_logits_of_each_sequence(name):
    model, tokens = MODELS[name](), ids(30)
    cache = Cache.of(model.config, 2)
    got = model(tokens, [0, 12, 30], last=1, cache=cache).logits
    assert_close(got, model(tokens, [0, 12, 30], last=1).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(dtype):
    model, tokens = build(POLICIES["overlap"], slopes=False).to(dtype), ids(40)
    cache = Cache.of(model.config)
    got = stream(model, tokens, [25, *[1] * 15], cache).double()
    assert all(x.dtype == dtype for x in cache.layers[0].entries.values())
    expected = model.double()(tokens).logits
    rms = ((got - expected).square().mean() / expected.square().mean()).sqrt()
    assert rms < {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]


def test_scores_that_the_caller_gives():
    policy = Policy(BoundaryRule(1, max_length=5), window=8, reduction=MeanPool())
    model, tokens, scores = build(policy), ids(30), torch.rand(30, dtype=torch.float64)
    cache, got = Cache.of(model.config), []
    for a, b in pairwise([0, 11, 12, 13, 30]):
        got.append(model(tokens[a:b], scores=scores[a:b], cache=cache).logits)
    assert_close(torch.cat(got), model(tokens, scores=scores).logits)
    with pytest.raises(ValueError, match=r"scores: expected scores \[1\]"):
        model(tokens[:1], cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match="scores: expected numbers, got 'NaN'"):
        model(tokens[:2], scores=scores[:2] * torch.nan, cache=cache)


def test_v4_attention_streams():
    sizes = V4Sizes(dim=16, heads=2, head_dim=16, query_rank=8, groups=2, output_rank=4)
    for policy in (POLICIES["top-2"], POLICIES["overlap"], POLICIES["sliding"]):
        layer = oracle.randomise(V4Attention(policy, sizes)).double()
        x, cache, got = torch.randn(30, 16, dtype=torch.float64), Cache(policy), []
        for piece in x.split([20, *[1] * 10]):
            cache.append(len(piece))
            got.append(layer(piece, cache=cache.layers[0]).out)
        rule = policy.boundaries
        chunks = Chunks.fixed(100 if rule is None else rule.stride, 30)
        assert_close(torch.cat(got), layer(x, chunks).out)


@policies
def test_its_chunks_are_those_of_the_whole(policy):
    if policy.boundaries is None:
        return
    model, tokens = build(policy, layers=1), ids(40)
    cache = Cache.of(model.config, 2)
    for piece in tokens.split([9, 1, 1, 29]):
        model(torch.stack([piece, piece]), cache=cache)
    views = model(torch.stack([tokens, tokens])).views[0]
    for ours, theirs in zip(cache.chunks(), views, strict=True):
        assert torch.equal(ours.starts, theirs.starts)
        assert torch.equal(ours.visible_from, theirs.visible_from)


@pytest.mark.parametrize("k", [-3, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 23])
def test_derived_views_follow_as_chunks_derive_them(k, n):
    from dynchunk.attention import Midpoints

    for seed in range(8):
        scores = torch.rand(n, generator=torch.Generator().manual_seed(seed))
        rule = BoundaryRule(seed % 2, max_length=4 + seed)
        base, moved, middle = Closings(), Closings(), Closings()
        rule_stream = rule.stream()
        for t in range(n):
            for one in rule_stream.push(float(scores[t])):
                if one.position:
                    base.append([one.position], [one.confirmed_at])
            follow(Shifted(k), base, moved, t + 1)
            follow(Midpoints(), base, middle, t + 1)
        for ours, theirs in ((moved, rule(scores).shifted(k)), (middle, rule(scores).midpoints())):
            closed = theirs.is_closed
            assert ours.ends.tolist() == theirs.ends[closed].tolist()
            assert ours.known.tolist() == theirs.visible_from[closed].tolist()


# P7: going back


@models
def test_case_4_draft_tokens_that_are_taken_back(name):
    model, prompt = MODELS[name](), ids(23)
    cache = Cache.of(model.config, rollback=12)
    model(prompt, cache=cache)
    for drafts in (1, 2, 4, 5, 8, 12):
        draft = ids(drafts, seed=drafts)
        one = poison(cache).fork()
        model(draft, cache=one)
        one.repeat(drafts + 1)  # so many tokens are accepted: 0, 1, .. all
        accepted = range(drafts + 1)
        poison(one).crop([23 + a for a in accepted])
        go_on(model, one, [torch.cat([prompt, draft[:a]]) for a in accepted])
    one = cache.fork()
    model(ids(12), cache=one)
    one.crop(-12)
    go_on(model, one, [prompt])


@models
def test_case_11_crop_to_any_length_then_other_tokens(name):
    model, tokens = MODELS[name](), ids(26)
    cache = Cache.of(model.config, rollback=None)
    stream(model, tokens, [20, *[1] * 6], cache)
    cache.repeat(27)
    poison(cache).crop(list(range(27)))
    go_on(model, cache, [tokens[:p] for p in range(27)])


@policies
def test_crop_within_the_rollback_after_many_tokens(policy):
    model, tokens = build(policy), ids(150)
    cache = Cache.of(model.config, rollback=20)
    stream(model, tokens, [60, *[1] * 60, 30], cache)
    assert cache.croppable == (130,)
    lengths = (149, 140, 133, 130)
    cache.repeat(4)
    poison(cache).crop(lengths)
    go_on(model, cache, [tokens[:p] for p in lengths], (1, 9))


def test_a_crop_beyond_the_limit_says_which_and_changes_nothing():
    model, tokens = build(POLICIES["hash-moved"]), ids(2, 90)
    cache = Cache.of(model.config, 2, rollback=16)
    model(tokens, cache=cache)
    message = (
        r"n: sequence 1 has lost the raw tokens to go back from 90 to 73; it can go back to 74 "
        r"\(rollback=16\), or to 0"
    )
    with pytest.raises(ValueError, match=message):
        cache.crop([80, 73])
    assert cache.check().lengths == (90, 90)
    cache.crop([80, 0])
    assert cache.check().lengths == (80, 0)
    cache.crop(500)
    assert cache.lengths == (80, 0)


# P8: other rows


@models
def test_case_27_beams_are_reordered_in_the_middle_of_chunks(name):
    model = MODELS[name]()
    for n in range(1, 12):
        rows = [ids(n, seed=1).tolist(), ids(n, seed=2).tolist(), ids(n, seed=3).tolist()]
        cache = Cache.of(model.config, 3)
        model(torch.tensor(rows), cache=cache)
        poison(cache).reorder(torch.tensor([1, 0, 0]))
        go_on(model, cache, [torch.tensor(rows[b]) for b in (1, 0, 0)], (1, 1))


@models
def test_case_6_a_slot_that_is_used_again_with_anothers_prefix(name):
    model, first, second = MODELS[name](), ids(25, seed=1), ids(11, seed=2)
    cache = Cache.of(model.config, 2, rollback=None)
    model(torch.cat([first, second]), [0, 25, 36], cache=cache)
    cache.reset(1)  # the second sequence has ended; another begins with 17 tokens of the first
    poison(cache).select([0, 0])
    cache.crop([25, 17])
    rest = ids(9, seed=3)
    for piece in rest.split([1, 1, 7]):
        got = model(piece, [0, 0, len(piece)], cache=poison(cache).check()).logits
    assert_close(got, model(torch.cat([first[:17], rest])).logits[-7:])
    assert_close(
        model(rest[:1], [0, 1, 1], cache=cache).logits,
        model(torch.cat([first, rest[:1]])).logits[-1:],
    )


@models
def test_case_7_a_fork_reuses_all_closed_chunks(name):
    model, tokens = MODELS[name](), ids(15)
    cache = Cache.of(model.config, rollback=None, page_size=1)
    model(tokens, cache=cache)
    logits = model(ids(5, seed=9), cache=cache.fork()).logits
    for p in range(13):
        one = cache.fork()
        one.crop(p)
        for i in range(len(cache.layouts)):
            layout, theirs = one.layouts[i], cache.layouts[i]
            for g in range(len(layout.policy.views)):
                pages = layout.table.held[g][0]
                assert len(pages) == layout.entries(g, 0)
                assert pages == theirs.table.held[g][0][: len(pages)]
            assert layout.table.pool is theirs.table.pool
        go_on(model, one, [tokens[:p]], (1, 7))
        cache.check()
    assert_close(model(ids(5, seed=9), cache=cache).logits, logits)


def test_forks_write_into_copies_and_leave_their_pages_when_they_go():
    model, tokens = build(POLICIES["fixed"], layers=1), ids(100)
    cache = Cache.of(model.config, page_size=8)
    model(tokens, cache=cache)
    pool = cache.layouts[0].table.pool
    used = pool.used
    forks = [cache.fork() for _ in range(5)]
    assert pool.used == used  # 33 entries in 5 pages, held six times
    for i, fork in enumerate(forks):
        stream(model, ids(6, seed=i), [6], fork)
    assert pool.used == used + 5  # the last page of each
    del forks, fork
    cache.check()
    assert pool.used == used


# What is held


def held(cache):
    tensors = [x for layer in cache.layers for x in (*layer.rows.values(), *layer.entries.values())]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(FixedStride(4), window=128, reduction=MeanPool()),
        Policy(BoundaryRule(1, max_length=8), window=16, reduction=MeanPool()),
        Policy(FixedStride(8), views=(AsScored(), Shifted(4)), window=16, reduction=MeanPool()),
        Policy(window=None),
    ],
    ids=["fixed", "content", "views", "full"],
)
def test_bytes_held_at_100k_tokens(policy):
    cache, k = Cache(policy), torch.randn(1_000, 2, 64)
    state = cache.layers[0]
    for _ in range(100):
        by_content = isinstance(policy.boundaries, BoundaryRule)
        cache.append(1_000, torch.rand(1_000) if by_content else ())
        pooled = state.extend(k=k) if policy.boundaries is None else state.extend(k=k, raw_k=k)
        if pooled is not None:
            heads = pooled["raw_k"].chunk(len(policy.views), 1)
            parts = zip(heads, state.step.closed.spans, strict=True)
            state.close([pool(part, spans) for part, spans in parts])
        state.finish()
    cache.check()
    assert held(cache) <= cache.nbytes <= 1.15 * cache.logical_nbytes
    entries = cache.physical_lengths(0)[0]
    assert cache.logical_nbytes < (entries + 1_000) * k[0].nbytes / len(policy.views) + 500_000


class Allocations(TorchDispatchMode):
    """The largest tensor that an operation makes, in bytes."""

    def __init__(self, cache, model):
        super().__init__()
        self.largest = 0
        held = [
            x for layer in cache.layers for x in (*layer.rows.values(), *layer.entries.values())
        ]
        held += [
            *model.parameters(),
            *(layout.table.tensor(cache.device) for layout in cache.layouts),
        ]
        self.known = {x.untyped_storage().data_ptr() for x in held}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def test_a_decode_step_allocates_nothing_that_grows_with_the_context():
    model = build(POLICIES["fixed"], layers=1, dtype=torch.float32, slopes=False)
    largest = []
    for n in (100, 1_600):
        cache = Cache.of(model.config)
        model(ids(n), last=1, cache=cache)
        where = cache.layers[0].entries["k"].data_ptr()
        with Allocations(cache, model) as allocations:
            stream(model, ids(40), [1] * 40, cache)
        assert cache.layers[0].entries["k"].data_ptr() == where
        largest.append(allocations.largest)
    assert 0 < largest[0] == largest[1] < 10_000


def test_case_34_what_is_dropped_is_given_back():
    model = build(POLICIES["fixed"], layers=1)
    cache = Cache.of(model.config, 8, rollback=None)
    model(ids(8, 400), cache=cache)
    before = cache.nbytes
    cache.select([3])
    assert cache.check().nbytes < before / 6
    assert held(cache) < cache.nbytes
    cache.crop(10)
    assert cache.check().nbytes < before / 25
    empty = Cache.of(model.config).nbytes
    cache.reset()
    assert cache.nbytes == empty


def test_case_36_kv_heads_are_not_repeated():
    policy = Policy(FixedStride(4), window=8, reduction=MeanPool())
    config = ModelConfig(VOCAB, 36, 1, 9, 3, 4, pattern=(policy,))
    cache = Cache.of(config)
    ChunkedTransformer(config)(ids(1_000), last=1, cache=cache)
    entries, raw = 250, 64 + 8
    of_head = 2 * 4 * 4  # keys and values, 4 channels, 4 bytes
    assert cache.physical_lengths(0) == (entries + raw - 1,)
    of_raw = 3 * of_head + 3 * 4 * 4  # and keys before RoPE, from which entries are made
    bound = (3 * of_head + 3 * 4) * 1.1 * (entries + 64) + of_raw * (2 * raw + 64)
    assert held(cache) < bound


def test_logical_and_physical_lengths():
    model = build(POLICIES["fixed-staggered"], layers=1)
    cache = Cache.of(model.config, 2, rollback=0)
    model(ids(60), [0, 40, 60], cache=cache)
    assert cache.lengths == (40, 20)
    # Two views of 4 tokens an entry, and the raw rows of a window of 4 less the next token.
    assert cache.physical_lengths(0) == (10 + 10 + 3, 5 + 5 + 3)
    assert "lengths=[40, 20]" in repr(cache)


# Files


@models
def test_case_8_save_and_load_at_every_length(name, tmp_path):
    model, tokens = MODELS[name](), ids(24)
    path = tmp_path / "cache.safetensors"
    for n in range(12):
        cache = Cache.of(model.config, 2, rollback=5)
        model(torch.cat([tokens[:n], tokens[: n // 2]]), [0, n, n + n // 2], cache=cache)
        poison(cache).save(path)
        again = Cache.load(path, model.config)
        assert again.check().lengths == (n, n // 2)
        assert again.croppable == cache.croppable
        go_on(model, again, [tokens[:n], tokens[: n // 2]], (1, 1, 6))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.fixture
def saved(tmp_path):
    model = MODELS["learned"]()
    cache = Cache.of(model.config, rollback=9)
    model(ids(30), cache=cache)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    return model, path


def test_case_8_a_file_that_lacks_any_field_is_refused(saved):
    model, path = saved
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    assert len(tensors) > 20
    for name in tensors:
        save_file({key: x for key, x in tensors.items() if key != name}, path, metadata)
        with pytest.raises(ValueError, match=f"lacks, or has too much, {name}"):
            Cache.load(path, model.config)
    for key in metadata:
        save_file(tensors, path, {k: v for k, v in metadata.items() if k != key})
        with pytest.raises(ValueError, match=r"lacks|not of a Cache|written in version None"):
            Cache.load(path, model.config)


def test_a_file_that_is_truncated_or_of_something_else_is_refused(saved):
    model, path = saved
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            Cache.load(path, model.config)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="a safetensors file, but not of a Cache"):
        Cache.load(path, model.config)
    with pytest.raises(FileNotFoundError):
        Cache.load(path.with_name("none"), model.config)


def test_a_file_of_another_version_or_policy_is_refused(saved):
    model, path = saved
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    other = ModelConfig.from_dict(model.config.as_dict() | {"heads": 4})
    with pytest.raises(ValueError, match=r"another model or policy: config.heads is 2 there and 4"):
        Cache.load(path, other)
    with pytest.raises(ValueError, match=r"policies\[0\].boundaries.* there and .* here"):
        Cache.load(path, [POLICIES["fixed"]] * 3)
    with pytest.raises(ValueError, match=r"policies is .* there"):
        Cache.load(path, POLICIES["fixed"])
    save_file(tensors, path, metadata | {"version": "7"})
    with pytest.raises(ValueError, match="written in version 7 of the format, this dynchunk reads"):
        Cache.load(path, model.config)


def test_a_save_that_fails_leaves_the_file_before_and_nothing_else(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()
    cache = Cache.load(path, model.config)
    model(ids(3), cache=cache)

    def fail(handle):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_save_that_is_killed_leaves_the_file_before(saved):
    model, path = saved
    before = path.read_bytes()
    code = f"""
import os, signal
from dynchunk.attention import ModelConfig
from dynchunk.cache import Cache
cache = Cache.load({str(path)!r}, ModelConfig.from_dict({model.config.as_dict()!r}))
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
cache.save({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    Cache.load(path, model.config)


# Errors


def test_a_cache_of_another_model_is_refused():
    model = build(POLICIES["fixed"])
    with pytest.raises(ValueError, match="cache: expected one for the policies of this model"):
        model(ids(3), cache=Cache([POLICIES["fixed"]]))
    layer = ChunkedAttention(POLICIES["mean"], 8, 2, 1)
    cache = Cache(POLICIES["fixed"])
    cache.append(3)
    with pytest.raises(ValueError, match="cache: expected one for Policy"):
        layer(torch.zeros(3, 8), cache=cache.layers[0])


def test_tokens_of_another_shape_are_refused():
    model, cache = build(POLICIES["fixed"]), None
    cache = Cache.of(model.config, 2)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets of 2 sequences"):
        model(ids(3), cache=cache)
    layer, cache = ChunkedAttention(POLICIES["fixed"], 8, 2, 1), Cache(POLICIES["fixed"])
    cache.append(3)
    with pytest.raises(ValueError, match="x: expected hidden states of the 3 tokens appended"):
        layer(torch.zeros(2, 8), cache=cache.layers[0])
    cache.reset()
    cache.append(3)
    layer(torch.zeros(3, 8), cache=cache.layers[0])
    cache.append(1)
    with pytest.raises(ValueError, match=r"k: expected a float32 tensor of shape \[1, 1, 4\]"):
        layer.double()(torch.zeros(1, 8).double(), cache=cache.layers[0])


def test_a_token_that_does_not_exist_changes_nothing():
    model = MODELS["learned"]()
    cache = Cache.of(model.config)
    with pytest.raises(IndexError):
        model(torch.tensor([1, VOCAB]), cache=cache)
    assert_close(stream(model, ids(9), [3, 6], cache), model(ids(9)).logits)


def test_a_forward_that_failed_half_way_is_not_forgotten():
    model = build(POLICIES["fixed"])
    cache = Cache.of(model.config)
    model(ids(5), cache=cache)
    model.blocks[1].attention_norm.forward = lambda x: x[:0]
    with pytest.raises(ValueError, match="x: expected hidden states of the 1 tokens appended"):
        model(ids(1), cache=cache)
    del model.blocks[1].attention_norm.forward
    for use in (
        lambda: model(ids(1), cache=cache),
        lambda: cache.crop(2),
        lambda: cache.select([0]),
        cache.fork,
    ):
        with pytest.raises(RuntimeError, match=r"layers \[1\] have not had the tokens appended"):
            use()
    cache.reset()
    assert_close(model(ids(5), cache=cache).logits, model(ids(5)).logits)


def test_arguments_are_checked():
    policy = POLICIES["fixed"]
    model = build(policy)
    cache = Cache.of(model.config, 2)
    for call, message in (
        (lambda: Cache(()), "policies: expected at least one Policy"),
        (lambda: Cache(policy, rollback=-1), "rollback: expected an integer >= 0"),
        (lambda: Cache(policy, page_size=0), "page_size: expected an integer >= 1"),
        (lambda: cache.crop([1]), "n: expected 2 lengths"),
        (lambda: cache.select([2]), r"rows: expected sequences in \[0, 2\)"),
        (lambda: cache.reorder([0]), "rows: expected 2 sequences"),
        (lambda: cache.repeat(0), "n: expected an integer >= 1"),
        (lambda: cache.reset([5]), "rows: expected sequences"),
        (lambda: cache.append([0, 1, 2], torch.rand(2)), "scores: expected 0 tensors"),
        (lambda: model(ids(2), chunks=Chunks.fixed(3, 2), cache=cache), "chunks: expected None"),
        (lambda: model(ids(2), log_p=torch.zeros(2), cache=cache), "log_p: expected None"),
        (lambda: model.blocks[0].attention(torch.zeros(2, 8)), "chunks: expected either chunks"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="n: expected an integer"):
        cache.crop([1.5, 2])
    with pytest.raises(RuntimeError, match="there are no new tokens"):
        _ = cache.layers[0].step
    assert cache.check().lengths == (0, 0)


def test_check_finds_what_is_broken():
    model = build(POLICIES["hash-moved"])

    def broken(damage):
        cache = Cache.of(model.config, 2)
        model(ids(2, 40), cache=cache)
        damage(cache)
        with pytest.raises(InvariantError) as found:
            cache.check()
        return str(found.value)

    def cut_stream(cache):
        cache.segments[0].streams[0][0].truncate(0)

    def lose_a_page(cache):
        cache.layouts[0].table.held[0][1].pop()

    def count_wrongly(cache):
        cache.layouts[0].table.pool.references[0] += 1

    def move_a_view(cache):
        cache.layouts[0].moved[1][0].ends[1] -= 1

    def drop_rows(cache):
        cache.layouts[0].map.begin += 30

    assert "a stream has its sequence's length" in broken(cut_stream)
    assert "pages" in broken(lose_a_page)
    assert "counted" in broken(count_wrongly)
    assert "view" in broken(move_a_view)
    assert "raw rows" in broken(drop_rows)


def test_an_empty_batch_and_empty_appends():
    model = build(POLICIES["fixed"])
    cache = Cache.of(model.config, 0)
    assert model(ids(0), [0], cache=cache).logits.shape == (0, VOCAB)
    cache = Cache.of(model.config, 3)
    assert model(ids(0), [0, 0, 0, 0], cache=cache.check()).logits.shape == (0, VOCAB)
    model(ids(9), [0, 4, 4, 9], cache=cache)
    model(ids(0), [0, 0, 0, 0], cache=cache)
    assert cache.check().lengths == (4, 0, 5)
    cache = Cache.of(model.config)
    model(ids(0), cache=cache)
    cache.repeat(3)
    assert cache.check().lengths == (0, 0, 0)
    assert_close(model(ids(3, 5), cache=cache).logits, model(ids(3, 5)).logits)


def test_an_index_over_a_pool_without_pages_finds_nothing():
    q, keys, weights = torch.zeros(2, 1, 4), torch.zeros(0, 8, 4), torch.zeros(2, 1)
    pages, sequence = torch.zeros(1, 2, 0, dtype=torch.int64), torch.tensor([0, 1])
    found = decode_topk(q, keys, weights, pages, sequence, torch.zeros_like(sequence)[None], 3)
    assert found.indices.tolist() == [[-1] * 3] * 2
