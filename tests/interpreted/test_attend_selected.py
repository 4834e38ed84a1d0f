import pytest
import torch
from agreement import assert_agree, run_attend
from dynchunk_kernels import _lists
from guards import guarded_memory
from ops_oracle import normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.attend_selected import attend_selected
from dynchunk.ops.layout import Reads

SIZES = {"heads": 4, "kv_heads": 2, "width": 16, "width_v": 16}


def lists(rows, heads, length, n, seed=0):
    """Random lists: entries seen and not, -1, repetitions, numbers past the end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, n + 2, (rows, heads, length), generator=generator)


def operands(views, dtype=torch.float32, heads=4, kv_heads=2, width=16, width_v=16, words=""):
    """Operands of attend_selected by name; ``width_v`` None: keys are the values."""
    tokens, n = views[0].num_tokens, sum(len(view) for view in views)
    per_view, kind = kv_heads // len(views), {"dtype": dtype}
    shared = width_v is None
    return {
        "q": normal(tokens, heads, width, seed=1, **kind),
        "k": normal(tokens, kv_heads, width, seed=2, **kind),
        "v": None if shared else normal(tokens, kv_heads, width_v, seed=3, **kind),
        "entry_k": normal(n, per_view, width, seed=4, **kind),
        "entry_v": None if shared else normal(n, per_view, width_v, seed=5, **kind),
        "bias": normal(n, per_view, seed=6, **kind) if "bias" in words else None,
        "sink": normal(heads, seed=7, **kind) if "sink" in words else None,
    }


def attending(indices, reads):
    def attend(q, k, v, entry_k, entry_v, bias, sink, impl):
        return attend_selected(
            q, k, v, entry_k, entry_v, indices, reads, bias=bias, sink=sink, impl=impl
        )

    return attend


def check(views, indices, reads, dtype=torch.float32, words="", **sizes):
    inputs = operands(views, dtype, words=words, **(SIZES | sizes))
    attend = attending(indices, reads)
    with guarded_memory():
        found = run_attend(attend, inputs, "triton", dtype)
    assert_agree(found, run_attend(attend, inputs, "reference", torch.float64), dtype)


@pytest.mark.parametrize(
    ("dtype", "words", "cover", "sizes"),
    [
        (torch.float32, "", "window", {}),
        (torch.float16, "", "window", {}),
        (torch.float32, "bias sink", "window", {"heads": 6, "width": 20, "width_v": 24}),
        (torch.bfloat16, "bias sink", "window", {"heads": 6, "width": 20, "width_v": 24}),
        (torch.float32, "bias", "tail", {"heads": 2, "width": 80, "width_v": 16}),
        (torch.float32, "sink", "tail", {"heads": 5, "kv_heads": 1, "width_v": None}),
        (torch.bfloat16, "sink", "tail", {"heads": 20, "kv_heads": 1, "width_v": None}),
        (torch.float32, "bias sink", "window", {"heads": 20, "kv_heads": 1, "width": 96}),
    ],
)
def test_equals_the_reference(dtype, words, cover, sizes):
    chunks = random_layout([0, 13, 13, 24])
    reads = Reads.of(chunks, window=5, cover=cover)
    check([chunks], lists(24, 1, 7, 6), reads, dtype, words, **sizes)


@pytest.mark.parametrize("list_heads", [1, 4])
def test_views(list_heads):
    views = [random_layout([0, 13, 24], seed=seed) for seed in (0, 1)]
    reads = Reads.of(views, window=5)
    check(views, lists(24, list_heads, 7, 6), reads, words="bias sink", kv_heads=4)


@pytest.mark.parametrize(("tokens", "mean"), [(1, 1), (63, 4), (111, 20), (257, 4)])
def test_awkward_sizes(tokens, mean):
    """The last queries of as many tokens, and lists longer than a tile."""
    n = min(tokens, 40)
    chunks = random_layout([0, tokens, tokens], mean=mean)
    inputs = operands([chunks], **(SIZES | {"heads": 2, "kv_heads": 1}))
    inputs["q"] = inputs["q"][-n:]
    reads = Reads.of(chunks, window=9, cu_seqlens_q=[0, n, n])
    attend = attending(lists(n, 1, 40, len(chunks)), reads)
    with guarded_memory():
        found = run_attend(attend, inputs, "triton", torch.float32)
    assert_agree(found, run_attend(attend, inputs, "reference", torch.float64), torch.float32)


@pytest.mark.parametrize("list_dtype", [torch.int32, torch.int64])
def test_queries_that_see_nothing(list_dtype):
    chunks = Chunks.fixed(4, [0, 3, 3, 14])
    for window, words in ((0, ""), (0, "sink"), (3, "")):
        reads = Reads.of(chunks, window=window)
        check([chunks], lists(14, 1, 2, 3).to(list_dtype), reads, words=words)


@pytest.mark.parametrize("length", [0, 1, 8, 13])
def test_case_22_lengths_of_lists(length):
    chunks = Chunks.fixed(2, [0, 0, 16, 16])
    indices = torch.arange(length).expand(16, 1, -1)
    check([chunks], indices, Reads.of(chunks, window=2), words="bias")
    no_query = Reads.of(chunks, window=2, cu_seqlens_q=[0, 0, 0, 0])
    inputs = operands([chunks]) | {"q": normal(0, 4, 16, dtype=torch.float32)}
    found = run_attend(attending(indices[:0], no_query), inputs, "triton", torch.float32)
    assert not found["grad_k"].any()
    assert not found["grad_entry_k"].any()


def test_the_last_queries_of_a_prompt():
    chunks = random_layout([0, 20, 37])
    reads = Reads.of(chunks, window=5, cu_seqlens_q=[0, 3, 12], cu_seqlens_k=[0, 8, 23])
    inputs = operands([chunks])
    inputs |= {"q": inputs["q"][:12], "k": inputs["k"][:23], "v": inputs["v"][:23]}
    attend = attending(lists(12, 1, 4, 9), reads)
    found = run_attend(attend, inputs, "triton", torch.float32)
    assert_agree(found, run_attend(attend, inputs, "reference", torch.float64), torch.float32)


def test_a_list_is_a_set():
    """Neither its order nor repetitions change a bit, of gradients neither."""
    chunks = random_layout([0, 20])
    reads, inputs = Reads.of(chunks, window=3), operands([chunks], words="bias sink")
    indices = lists(20, 2, 6, len(chunks))
    again = torch.cat([indices.flip(-1), indices, torch.full_like(indices, -1)], -1)
    found, same = (
        run_attend(attending(x, reads), inputs, "triton", torch.float32) for x in (indices, again)
    )
    assert all(torch.equal(found[name], same[name]) for name in found)


def test_rows_of_a_list_stand_side_by_side():
    """What a product of tiles sums, and how, depends on a row's place: no holes between them."""
    rows = torch.tensor([[[5, 2, 5, 7, 2, 9]], [[3, 3, 3, 3, 3, 3]], [[8, 8, 8, 8, 8, 8]]])
    sets = _lists.as_sets(rows, rows < 8)
    none = _lists.NONE
    assert sets.rows.tolist() == [[[2, 5, 7, *[none] * 3]], [[3, *[none] * 5]], [[none] * 6]]
    assert sets.lengths.tolist() == [[3], [1], [0]]


def test_case_15_rows_of_a_batch_are_those_of_one():
    one, three = Chunks.fixed(3, 13), Chunks.fixed(3, [0, 13, 26, 39])
    inputs, indices = operands([one], words="sink"), lists(13, 1, 2, 4)
    alone = attending(indices, Reads.of(one, window=2))(impl="triton", **inputs)
    batch = {
        name: x if x is None or name == "sink" else x.repeat(3, *[1] * (x.ndim - 1))
        for name, x in inputs.items()
    }
    found = attending(indices.repeat(3, 1, 1), Reads.of(three, window=2))(impl="triton", **batch)
    assert torch.equal(found.out, alone.out.repeat(3, 1, 1))
    assert torch.equal(found.lse, alone.lse.repeat(3, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_p5_rows_that_nobody_reads_may_hold_anything(shared):
    chunks = random_layout([0, 9, 9, 30])
    reads = Reads.of(chunks, window=2)
    indices = lists(30, 1, 3, 4)
    inputs = operands([chunks], words="bias", width_v=None if shared else 16)
    grads = run_attend(attending(indices, reads), inputs, "triton", torch.float32)
    is_read = [bool(grads[f"grad_{x}"][i].any()) for x in ("entry_k",) for i in range(len(chunks))]
    unread = [i for i, read in enumerate(is_read) if not read]
    assert unread
    for name in ("entry_k", "entry_v", "bias"):
        if inputs[name] is not None:
            inputs[name][unread] = torch.nan
    found = run_attend(attending(indices, reads), inputs, "triton", torch.float32)
    for name, x in found.items():
        assert torch.equal(x, grads[name]), name


def test_case_19_packed_documents_do_not_leak():
    """A document full of NaN changes no bit of the others' results and gradients."""
    cu = [0, 7, 7, 20, 31]
    chunks = Chunks.fixed(3, cu)
    reads, indices = Reads.of(chunks, window=2), lists(31, 1, 3, 4)
    inputs = operands([chunks])
    before = run_attend(attending(indices, reads), inputs, "triton", torch.float32, False)
    for name in ("q", "k", "v"):
        inputs[name][7:20] = torch.nan
    own = chunks.sequence_ids == 2
    inputs["entry_k"][own] = inputs["entry_v"][own] = torch.nan
    after = run_attend(attending(indices, reads), inputs, "triton", torch.float32, False)
    token = torch.ones(31, dtype=torch.bool)
    token[7:20] = False
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        assert torch.equal(after[name][token], before[name][token]), name
    for name in ("grad_entry_k", "grad_entry_v"):
        assert torch.equal(after[name][~own], before[name][~own]), name


def test_wide_float32_has_results_but_no_gradients():
    """A launch that spills kilobytes, or does not fit, is refused before it starts."""
    views = [Chunks.fixed(2, 8)]
    reads, indices = Reads.of(views[0], window=3), lists(8, 1, 2, 4)
    inputs = operands(views, heads=1, kv_heads=1, width=144, width_v=16)
    attend, sizes = attending(indices, reads), {"heads": 1, "kv_heads": 1, "width_v": 16}
    expected = attend(impl="reference", **inputs).out
    torch.testing.assert_close(attend(impl="triton", **inputs).out, expected)
    with pytest.raises(ValueError, match="at most 128 channels for gradients in float32, got 144"):
        run_attend(attend, inputs, "triton", torch.float32)
    check(views, indices, reads, torch.bfloat16, width=144, **sizes)
