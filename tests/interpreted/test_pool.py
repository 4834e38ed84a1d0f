from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from guards import guarded_memory
from ops_oracle import normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool
from dynchunk.ops.pool_state import PoolState, pool_state
from dynchunk.packing import plan_tiles

NAMES = ("values", "gate", "slot_bias", "norm")


def operands(chunks, mode, overlap, dtype=torch.float32, heads=2, width=16, slots=3):
    """Keyword arguments of pool, by the words in ``mode``."""
    channels = width * (2 if overlap else 1)
    shape = (chunks.num_tokens, heads, channels)
    given = {
        "values": normal(*shape, dtype=dtype, seed=1),
        "gate": normal(*shape, dtype=dtype, seed=2) if "gate" in mode else None,
        "slot_bias": normal(slots, heads, channels, seed=3).float() if "bias" in mode else None,
        "norm": normal(width, dtype=dtype, seed=4) if "norm" in mode else None,
    }
    if "rope" in mode:
        angles = normal(len(chunks), max(width // 4, 1), seed=5).float()
        given["rope"] = (angles.cos(), angles.sin())
    return given


def run(given, spans, impl, wide=False, **options):
    """Entries and gradients of pool."""
    given = given | options
    inputs = {name: given[name] for name in NAMES if given.get(name) is not None}
    if wide:
        inputs = {name: x.double() for name, x in inputs.items()}
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    call = given | inputs
    out = pool(call.pop("values"), spans, **call, impl=impl)
    grad = normal(*out.shape, dtype=given["values"].dtype, seed=9)
    grads = torch.autograd.grad(out, list(inputs.values()), grad.to(out.dtype))
    return {"entries": out.detach(), **dict(zip(inputs, grads, strict=True))}


def assert_agree(found, expected, dtype):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.shape == expected[name].shape
        if x.numel() == 0:
            continue
        error = x.double() - expected[name]
        size = expected[name].square().mean().sqrt()
        rms, worst = (5e-3, 1.0) if dtype == torch.bfloat16 else (1e-5, 1e-4)
        assert error.square().mean().sqrt() <= rms * size, name
        assert error.abs().max() <= worst * max(size, 1), name


def check(chunks, mode, overlap, dtype=torch.float32, **sizes):
    given, spans = (
        operands(chunks, mode, overlap, dtype, **sizes),
        Spans.of(chunks, overlap=overlap),
    )
    with guarded_memory():
        found = run(given, spans, "triton")
    assert_agree(found, run(given, spans, "reference", wide=True), dtype)


MODES = ["mean", "gate", "bias", "gate+bias", "mean+norm", "gate+rope", "gate+bias+norm+rope"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference(mode, overlap, dtype):
    check(random_layout([0, 63, 63, 111]), mode, overlap, dtype)


@pytest.mark.parametrize("tokens", [1, 2, 63, 111, 257])
def test_awkward_lengths(tokens):
    check(random_layout([0, tokens, tokens]), "gate+bias+norm+rope", True)


@pytest.mark.parametrize(("heads", "width"), [(3, 80), (1, 2), (5, 60), (1, 600), (40, 16)])
def test_awkward_heads(heads, width):
    mode = "gate+bias" if width > 512 else "gate+bias+norm+rope"
    check(random_layout([0, 13], mean=3), mode, True, heads=heads, width=width)


def test_one_head_of_512_channels():
    check(random_layout([0, 13]), "gate+bias+norm+rope", True, heads=1, width=512)


@pytest.mark.parametrize("slots", [1, 7, 40])
def test_chunks_of_1_to_40_tokens(slots):
    lengths = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:12] + 1
    check(Chunks.from_lengths(lengths), "gate+bias", True, heads=1, slots=slots)


def test_more_chunks_than_a_part_of_the_slot_bias_gradient_has():
    check(Chunks.from_lengths([1] * 200), "gate+bias", False, heads=1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 3, 3]])
def test_case_22_nothing_to_pool(cu, overlap):
    check(Chunks.fixed(4, cu), "gate+bias+norm+rope", overlap)


def test_large_logits_do_not_overflow():
    chunks = random_layout([0, 63])
    given, spans = operands(chunks, "gate", False), Spans.of(chunks)
    given["gate"] = given["gate"] * 8 + 1000
    expected = run(given, spans, "reference", wide=True)
    assert_agree(run(given, spans, "triton"), expected, torch.float32)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e9])
@pytest.mark.parametrize("overlap", [False, True])
def test_p5_open_chunks_pool_to_zero_and_pass_no_gradient(overlap, poison):
    chunks = Chunks.fixed(5, [0, 13, 14, 31])
    given, spans = operands(chunks, "gate+bias+norm", overlap), Spans.of(chunks, overlap=overlap)
    clean = run(given, spans, "triton")
    is_open = ~chunks.is_closed[chunks.ids]
    for name in ("values", "gate"):
        given[name] = given[name].clone()
        given[name][is_open] = poison
    found = run(given, spans, "triton")
    assert all(torch.equal(found[name], clean[name]) for name in found)
    assert not found["values"][is_open].any()
    assert not found["gate"][is_open].any()


@pytest.mark.parametrize("overlap", [False, True])
def test_p4_a_sequence_alone_gives_the_same_bits(overlap):
    chunks = random_layout([0, 17, 17, 40, 63])
    given = operands(chunks, "gate+bias+norm", overlap)
    found = run(given, Spans.of(chunks, overlap=overlap), "triton")["entries"]
    for b, (begin, end) in enumerate(pairwise(chunks.cu_seqlens.tolist())):
        first, last = chunks.cu_chunks[b : b + 2].tolist()
        part = given | {name: given[name][begin:end] for name in ("values", "gate")}
        alone = run(part, Spans.of(chunks.sequence(b), overlap=overlap), "triton")["entries"]
        assert torch.equal(found[first:last], alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_gathered_from_tiles_whose_padding_is_never_read(overlap):
    chunks = random_layout([0, 30, 63])
    given, spans = operands(chunks, "gate+bias", overlap), Spans.of(chunks, overlap=overlap)
    expected = run(given, spans, "triton")
    plan = plan_tiles(chunks, 16, "best_fit")
    packed = dict(given)
    for name in ("values", "gate"):
        packed[name] = plan.pack(given[name]).rows
        packed[name][plan.segment_ids < 0] = torch.nan
    found = run(packed, spans, "triton", rows=plan.row_of_token)
    assert torch.equal(found["entries"], expected["entries"])
    for name in ("values", "gate"):
        assert torch.equal(found[name], plan.pack(expected[name]).rows)
    wide = run(packed, spans, "reference", wide=True, rows=plan.row_of_token)
    assert_agree(found, wide, torch.float32)


def test_heads_of_a_view_and_a_gate_that_broadcasts():
    chunks = random_layout([0, 31])
    values, gate = normal(31, 4, 20, dtype=torch.float32), normal(31, 1, 1, dtype=torch.float32)
    spans = Spans.of(chunks)
    found = pool(values[:, 1:3, :16], spans, gate=gate, impl="triton")
    expected = pool(values[:, 1:3, :16].double(), spans, gate=gate.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "gate", "gate+bias"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_p3_a_state_after_any_split_is_that_of_one_shot(impl, mode):
    chunks = Chunks.from_lengths([7, 1, 12])
    given, expected = operands(chunks, mode, False), None
    for step in (20, 1, 3):
        state = PoolState.empty(3, 2, 16)
        for begin in range(0, 20, step):
            end = min(begin + step, 20)
            piece = {name: given[name] for name in ("gate", "slot_bias")}
            if piece["gate"] is not None:
                piece["gate"] = piece["gate"][begin:end]
            starts = chunks.starts.clamp(begin, end)
            ends = chunks.ends.clamp(begin, end)
            with guarded_memory() if impl == "triton" else nullcontext():
                state = pool_state(
                    given["values"][begin:end], state, starts - begin, ends - begin,
                    starts - chunks.starts, impl=impl, **piece,
                )  # fmt: skip
        if expected is None:
            wide = {name: None if x is None else x.double() for name, x in given.items()}
            expected = pool(wide.pop("values"), Spans.of(chunks), **wide)
        torch.testing.assert_close(state.entries().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_state_of_no_token(impl):
    empty, at = PoolState.empty(2, 1, 4), torch.zeros(2, dtype=torch.int64)
    state = pool_state(torch.ones(3, 1, 4), empty, at, at, at, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(state, empty, strict=True))
    assert not state.entries().any()


def test_float64_is_refused():
    with pytest.raises(ValueError, match="impl: expected 'reference' for float64"):
        pool(normal(4, 2, 3), Spans.of(Chunks.fixed(2, 4)), impl="triton")
