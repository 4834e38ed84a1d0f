import pytest
import torch
from agreement import assert_agree, run_attend
from guards import guarded_memory
from ops_oracle import normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.attend_selected_chunks import attend_selected_chunks
from dynchunk.ops.layout import Reads


def lists(reads, block, heads, length, n, seed=0):
    """Random lists for blocks of queries: -1, repetitions and numbers past the end among them."""
    rows = int((-(-reads.cu_seqlens_q.diff() // block)).sum())
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, n + 2, (rows, heads, length), generator=generator)


def operands(reads, dtype=torch.float32, heads=4, kv_heads=2, width=16, width_v=16, words=""):
    """Operands of attend_selected_chunks by name; ``width_v`` None: keys are the values."""
    queries, tokens, kind = int(reads.cu_seqlens_q[-1]), int(reads.cu_seqlens_k[-1]), dtype
    v = None if width_v is None else normal(tokens, kv_heads, width_v, seed=3, dtype=kind)
    return {
        "q": normal(queries, heads, width, seed=1, dtype=kind),
        "k": normal(tokens, kv_heads, width, seed=2, dtype=kind),
        "v": v,
        "sink": normal(heads, seed=7, dtype=kind) if "sink" in words else None,
    }


def attending(indices, reads, block):
    def attend(q, k, v, sink, impl):
        return attend_selected_chunks(q, k, v, indices, reads, block=block, sink=sink, impl=impl)

    return attend


def check(reads, indices, block, dtype=torch.float32, **sizes):
    inputs = operands(reads, dtype, **sizes)
    attend = attending(indices, reads, block)
    with guarded_memory():
        found = run_attend(attend, inputs, "triton", dtype)
    assert_agree(found, run_attend(attend, inputs, "reference", torch.float64), dtype)


@pytest.mark.parametrize(
    ("dtype", "block", "window", "cover", "sizes"),
    [
        (torch.float32, 1, 5, "window", {}),
        (torch.float16, 4, 5, "window", {}),
        (torch.float32, 4, 0, "window", {"words": "sink", "heads": 6, "width": 20, "width_v": 24}),
        (torch.bfloat16, 4, 0, "window", {"words": "sink", "heads": 6, "width": 20}),
        (torch.float32, 7, 3, "tail", {"heads": 2, "width": 80}),
        (torch.float32, 16, 5, "window", {"heads": 5, "kv_heads": 1, "width_v": None}),
        (torch.bfloat16, 16, 5, "window", {"heads": 5, "kv_heads": 1, "width_v": None}),
    ],
)
def test_equals_the_reference(dtype, block, window, cover, sizes):
    chunks = random_layout([0, 13, 13, 24])
    reads = Reads.of(chunks, window=window, cover=cover)
    check(reads, lists(reads, block, 1, 4, 6), block, dtype, **sizes)


@pytest.mark.parametrize("list_heads", [1, 4])
def test_views(list_heads):
    reads = Reads.of([random_layout([0, 20, 37], seed=seed) for seed in (0, 1)], window=5)
    check(reads, lists(reads, 8, list_heads, 4, 9), 8, kv_heads=4)


@pytest.mark.parametrize(("tokens", "mean"), [(1, 1), (63, 4), (111, 20), (257, 20)])
def test_awkward_sizes(tokens, mean):
    """Chunks of 1 to 40 tokens too: several in a tile, and tiles inside one chunk."""
    n = min(tokens, 40)
    chunks = random_layout([0, tokens, tokens], mean=mean)
    reads = Reads.of(chunks, window=9, cu_seqlens_q=[0, n, n])
    indices = lists(reads, 16, 1, 9, len(chunks))
    check(reads, indices, 16, heads=2, kv_heads=1)


@pytest.mark.parametrize("length", [0, 1, 8, 13])
def test_case_22_lengths_of_lists(length):
    reads = Reads.of(Chunks.fixed(2, [0, 0, 16, 16]), window=2)
    check(reads, torch.arange(length).expand(4, 1, -1), 4)
    no_query = Reads.of(Chunks.fixed(2, [0, 0, 16, 16]), window=2, cu_seqlens_q=[0, 0, 0, 0])
    inputs, none = operands(no_query), torch.zeros(0, 1, length, dtype=torch.int64)
    found = run_attend(attending(none, no_query, 4), inputs, "triton", torch.float32)
    assert not found["grad_k"].any()


def test_queries_that_read_nothing():
    reads = Reads.of(Chunks.fixed(4, [0, 3, 3, 14]), window=0)
    for sizes in ({}, {"words": "sink"}):
        check(reads, lists(reads, 4, 1, 1, 3) * 0 + 1, 4, **sizes)


@pytest.mark.parametrize("block", [1, 4])
def test_the_last_queries_of_a_prompt(block):
    """Chunks that k has lost, wholly or in part, too."""
    chunks = random_layout([0, 20, 37])
    reads = Reads.of(chunks, window=5, cu_seqlens_q=[0, 3, 12], cu_seqlens_k=[0, 8, 23])
    check(reads, lists(reads, block, 1, 6, 9), block)


def test_a_list_is_a_set():
    """Neither its order nor repetitions change a bit, of gradients neither."""
    chunks = random_layout([0, 20])
    reads = Reads.of(chunks, window=3)
    indices, inputs = lists(reads, 4, 2, 6, len(chunks)), operands(reads)
    again = torch.cat([indices.flip(-1), indices, torch.full_like(indices, -1)], -1)
    found, same = (
        run_attend(attending(x, reads, 4), inputs, "triton", torch.float32)
        for x in (indices, again)
    )
    assert all(torch.equal(found[name], same[name]) for name in found)


def test_case_15_rows_of_a_batch_are_those_of_one():
    one = Reads.of(Chunks.fixed(3, 13), window=2)
    three = Reads.of(Chunks.fixed(3, [0, 13, 26, 39]), window=2)
    inputs, indices = operands(one), lists(one, 4, 1, 2, 4)
    alone = attending(indices, one, 4)(impl="triton", **inputs)
    batch = {name: None if x is None else x.repeat(3, 1, 1) for name, x in inputs.items()}
    found = attending(indices.repeat(3, 1, 1), three, 4)(impl="triton", **batch)
    assert torch.equal(found.out, alone.out.repeat(3, 1, 1))
    assert torch.equal(found.lse, alone.lse.repeat(3, 1))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_p6_tokens_after_a_query_may_hold_anything(shared, poison):
    """Although other queries of its block read them: those get NaN."""
    reads = Reads.of(random_layout([0, 30]), window=2)
    indices = lists(reads, 8, 1, 3, 8)
    inputs = operands(reads, width_v=None if shared else 16)
    attend = attending(indices, reads, 8)
    before = run_attend(attend, inputs, "triton", torch.float32, False)
    inputs["k" if shared else "v"][20:] = poison
    after = run_attend(attend, inputs, "triton", torch.float32, False)
    for name in ("out", "grad_q"):
        assert torch.equal(after[name][:20], before[name][:20]), name
        assert after[name][20:].isnan().any(-1).all(), name


def test_case_19_packed_documents_do_not_leak():
    """A document full of NaN changes no bit of the others' results and gradients."""
    cu = [0, 7, 7, 20, 31]
    reads = Reads.of(Chunks.fixed(3, cu), window=2)
    inputs, indices = operands(reads), lists(reads, 4, 1, 3, 4)
    attend = attending(indices, reads, 4)
    before = run_attend(attend, inputs, "triton", torch.float32, False)
    for name in ("q", "k", "v"):
        inputs[name][7:20] = torch.nan
    after = run_attend(attend, inputs, "triton", torch.float32, False)
    others = [*range(7), *range(20, 31)]
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        assert torch.equal(after[name][others], before[name][others]), name


def test_wide_float32_has_results_but_no_gradients():
    reads, indices = Reads.of(Chunks.fixed(2, 8), window=3), torch.tensor([[0, 2]] * 8)
    inputs = operands(reads, heads=1, kv_heads=1, width=144)
    attend = attending(indices, reads, 1)
    expected = attend(impl="reference", **inputs).out
    torch.testing.assert_close(attend(impl="triton", **inputs).out, expected)
    with pytest.raises(ValueError, match="at most 128 channels for gradients in float32, got 144"):
        run_attend(attend, inputs, "triton", torch.float32)
    check(reads, indices, 1, torch.bfloat16, heads=1, kv_heads=1, width=144)


def test_wide_heads_with_values_of_their_own():
    """Gradients of keys take tiles of 16 rows there; chunks begin in one and end in another."""
    reads = Reads.of(Chunks.from_lengths([7, 20, 1, 9]), window=3)
    indices = torch.tensor([[0, 1], [1, 3], [2, -1]]).repeat(13, 1)[:37]
    check(reads, indices, 1, torch.bfloat16, heads=1, kv_heads=1, width=272, width_v=16)
