import ops_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import assert_close, few, layouts, normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool
from dynchunk.packing import plan_tiles

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
MODES = ["mean", "gate", "gate+bias", "bias"]


def operands(chunks, mode, overlap, dtype=torch.float64, heads=2, width=3, slots=3, seed=0):
    """Return (values, gate, slot_bias) of a mode; None where it has none."""
    channels = width * (2 if overlap else 1)
    values, gate = (
        normal(chunks.num_tokens, heads, channels, dtype=dtype, seed=seed + i) for i in (0, 1)
    )
    slot_bias = normal(slots, channels, dtype=torch.promote_types(dtype, torch.float32))
    return values, gate if "gate" in mode else None, slot_bias if "bias" in mode else None


@few
@given(
    layouts(),
    st.sampled_from(MODES),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_equals_a_loop(chunks, mode, overlap, dtype, slots, seed):
    values, gate, bias = operands(chunks, mode, overlap, dtype, slots=slots, seed=seed)
    found = pool(values, Spans.of(chunks, overlap=overlap), gate=gate, slot_bias=bias)
    assert found.dtype == dtype
    assert_close(found, oracle.pool(values, chunks, gate, bias, overlap))


@pytest.mark.parametrize("tokens", [1, 2, 63, 111])
@pytest.mark.parametrize("width", [16, 60, 100])
def test_equals_a_loop_at_awkward_sizes(tokens, width):
    chunks = random_layout([0, tokens, tokens, 2 * tokens])
    values, gate, bias = operands(chunks, "gate+bias", True, torch.float32, heads=1, width=width)
    found = pool(values, Spans.of(chunks, overlap=True), gate=gate, slot_bias=bias)
    assert_close(found, oracle.pool(values, chunks, gate, bias, True))


@few
@given(layouts(max_tokens=6), st.sampled_from(MODES), st.booleans())
def test_gradients(chunks, mode, overlap):
    inputs = operands(chunks, mode, overlap, heads=1, width=2)
    present = [x.requires_grad_() for x in inputs if x is not None]

    def run(*given):
        it = iter(given)
        values, gate, bias = (None if x is None else next(it) for x in inputs)
        return pool(values, Spans.of(chunks, overlap=overlap), gate=gate, slot_bias=bias)

    assert chunks.num_tokens == 0 or torch.autograd.gradcheck(run, present)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_low_precision(dtype):
    chunks = random_layout([0, 63, 63, 111])
    spans, grads = Spans.of(chunks, overlap=True), []
    for cast in (torch.float64, dtype):
        exact = operands(chunks, "gate+bias", True, dtype, width=16)
        inputs = [x.detach().to(cast if x.dtype == dtype else x.dtype) for x in exact]
        inputs = [x.to(torch.float64) if cast == torch.float64 else x for x in inputs]
        values, gate, bias = (x.requires_grad_() for x in inputs)
        out = pool(values, spans, gate=gate, slot_bias=bias)
        seed_grad = normal(*out.shape, dtype=dtype)
        grads.append(torch.autograd.grad(out, [values, gate, bias], seed_grad.to(out.dtype)))
    for expected, found in zip(*grads, strict=True):
        assert_close(found, expected, dtype)


def after(entries, norm, eps, angles):
    """Norm and RoPE as modules would do them."""
    entries = torch.nn.functional.rms_norm(entries, norm.shape, norm, eps)
    still, turning = entries.split(
        [entries.shape[-1] - 2 * angles.shape[1], 2 * angles.shape[1]], -1
    )
    spin = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.view_as_real(torch.view_as_complex(turning.unflatten(-1, (-1, 2))) * spin)
    return torch.cat([still, turned.flatten(-2)], -1)


@few
@given(layouts(max_tokens=6), st.sampled_from(MODES), st.booleans(), st.integers(0, 2))
def test_norm_and_rope_are_what_modules_do(chunks, mode, overlap, pairs):
    inputs = [x for x in operands(chunks, mode, overlap, width=4) if x is not None]
    inputs = [x.requires_grad_() for x in (*inputs, normal(4, seed=7))]
    angles = normal(len(chunks), pairs, seed=8)
    names = [name for name in ("gate", "slot_bias") if name.removeprefix("slot_") in mode]

    def run(values, *others):
        *given, norm = others
        options = dict(zip(names, given, strict=True))
        rope = (angles.cos(), angles.sin())
        spans = Spans.of(chunks, overlap=overlap)
        return (
            pool(values, spans, **options, norm=norm, eps=1e-5, rope=rope),
            after(pool(values, spans, **options), norm, 1e-5, angles),
        )

    found, expected = run(*inputs)
    assert_close(found, expected.detach())
    if chunks.is_closed.any():
        grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (found, expected)]
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@few
@given(layouts(), st.booleans(), st.sampled_from([8, 16]))
def test_rows_may_lie_anywhere_and_others_are_not_read(chunks, overlap, tile):
    values, gate, bias = operands(chunks, "gate+bias", overlap)
    spans, plan = Spans.of(chunks, overlap=overlap), plan_tiles(chunks, tile, "best_fit")
    packed = [plan.pack(x).rows for x in (values, gate)]
    for x in packed:
        x[plan.segment_ids < 0] = torch.nan
    inputs = [x.requires_grad_() for x in (values, gate, *packed)]
    expected = pool(values, spans, gate=gate, slot_bias=bias)
    found = pool(
        packed[0], spans, gate=packed[1], slot_bias=bias, rows=plan.row_of_token, impl="reference"
    )
    assert torch.equal(found, expected)
    if chunks.is_closed.any():
        grads = torch.autograd.grad(found.square().sum(), packed)
        theirs = torch.autograd.grad(expected.square().sum(), inputs[:2])
        for mine, other in zip(grads, theirs, strict=True):
            assert torch.equal(mine, plan.pack(other).rows)


def test_gate_and_bias_broadcast():
    chunks = Chunks.fixed(3, 7)
    spans, values = Spans.of(chunks), normal(7, 2, 4)
    gate, bias = normal(7, 1, 1, seed=1), normal(3, 2, 4, seed=2)
    found = pool(values, spans, gate=gate, slot_bias=bias)
    for h in range(2):
        alone = pool(values[:, h], spans, gate=gate[:, 0].expand(7, 4), slot_bias=bias[:, h])
        assert torch.equal(found[:, h], alone)


@few
@given(layouts(), st.booleans())
def test_p4_a_sequence_alone_gives_the_same_bits(chunks, overlap):
    values, gate, bias = operands(chunks, "gate+bias", overlap, torch.float32)
    found = pool(values, Spans.of(chunks, overlap=overlap), gate=gate, slot_bias=bias)
    for b in range(chunks.num_sequences):
        begin, end = chunks.cu_seqlens[b : b + 2].tolist()
        first, last = chunks.cu_chunks[b : b + 2].tolist()
        spans = Spans.of(chunks.sequence(b), overlap=overlap)
        alone = pool(values[begin:end], spans, gate=gate[begin:end], slot_bias=bias)
        assert torch.equal(found[first:last], alone)


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize("overlap", [False, True])
def test_p2_equal_content_gives_equal_entries(shift, overlap):
    chunks = random_layout([0, 63])
    values, gate, bias = operands(chunks, "gate+bias", overlap, torch.float32)
    moved = Chunks.from_boundaries(chunks.starts + shift, 63 + shift)
    prefix = normal(shift, *values.shape[1:], dtype=torch.float32, seed=9)
    here = pool(values, Spans.of(chunks, overlap=overlap), gate=gate, slot_bias=bias)
    there = pool(
        torch.cat([prefix, values]),
        Spans.of(moved, overlap=overlap),
        gate=torch.cat([prefix, gate]),
        slot_bias=bias,
    )
    skipped = 1 if overlap else 0  # the first chunk now has one before it
    assert torch.equal(here[skipped:], there[1 + skipped :])


@few
@given(layouts(), st.booleans(), st.sampled_from([float("nan"), float("inf"), 1e9]))
def test_p5_open_chunks_pool_to_zero_and_pass_no_gradient(chunks, overlap, poison):
    values, gate, bias = operands(chunks, "gate+bias", overlap)
    spans = Spans.of(chunks, overlap=overlap)
    clean = pool(values, spans, gate=gate, slot_bias=bias)
    is_open = ~chunks.is_closed[chunks.ids]
    values[is_open] = poison
    gate[is_open] = poison
    inputs = [x.requires_grad_() for x in (values, gate, bias)]
    found = pool(values, spans, gate=gate, slot_bias=bias)
    assert torch.equal(found, clean)
    assert not found[~chunks.is_closed].any()
    grads = torch.autograd.grad(found.square().sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][is_open].any()
    assert not grads[1][is_open].any()


@few
@given(layouts(), st.booleans(), st.data())
def test_p6_a_token_changes_its_own_entry_and_with_overlap_the_next(chunks, overlap, data):
    if chunks.num_tokens == 0:
        return
    values, gate, bias = operands(chunks, "gate+bias", overlap)
    spans = Spans.of(chunks, overlap=overlap)
    before = pool(values, spans, gate=gate, slot_bias=bias)
    t = data.draw(st.integers(0, chunks.num_tokens - 1))
    values[t] += 1.0
    own = int(chunks.ids[t])
    same = [i for i in range(len(chunks)) if i not in (own, own + overlap)]
    assert torch.equal(pool(values, spans, gate=gate, slot_bias=bias)[same], before[same])


@pytest.mark.parametrize("stride", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_case_3_entries_of_a_prefix_are_those_of_the_whole(stride, overlap):
    n = 3 * stride + 1
    whole = Chunks.fixed(stride, n)
    values, gate, bias = operands(whole, "gate+bias", overlap)
    entries = pool(values, Spans.of(whole, overlap=overlap), gate=gate, slot_bias=bias)
    for t in range(n + 1):
        spans = Spans.of(Chunks.fixed(stride, t), overlap=overlap)
        prefix = pool(values[:t], spans, gate=gate[:t], slot_bias=bias)
        assert torch.equal(prefix[: t // stride], entries[: t // stride])
        assert not prefix[t // stride :].any()


@pytest.mark.parametrize("stride", [2, 3, 4, 5, 8])
def test_case_12_every_length_of_a_last_chunk(stride):
    for n in range(1, 2 * stride + 2):
        inferred, explicit = Chunks.fixed(stride, n), Chunks.fixed(stride, [0, n])
        values, gate, bias = operands(inferred, "gate+bias", False)
        a, b = (pool(values, Spans.of(c), gate=gate, slot_bias=bias) for c in (inferred, explicit))
        assert torch.equal(a, b)
        assert_close(a, oracle.pool(values, inferred, gate, bias))


@pytest.mark.parametrize("stride", [3, 5])
def test_case_15_rows_of_a_batch_of_eight_are_those_of_one(stride):
    row, cu = normal(13, 2, 6, dtype=torch.float32), [13 * b for b in range(9)]
    alone = pool(row, Spans.of(Chunks.fixed(stride, 13), overlap=True), gate=row)
    batch = row.repeat(8, 1, 1)
    together = pool(batch, Spans.of(Chunks.fixed(stride, cu), overlap=True), gate=batch)
    assert torch.equal(together, alone.repeat(8, 1, 1))


@pytest.mark.parametrize("stride", [2, 3, 4, 8])
def test_case_19_packed_documents_do_not_leak(stride):
    cu = [0, 1, stride, stride, 2 * stride + 1, 3 * stride + 2]
    chunks = Chunks.fixed(stride, cu)
    spans, values = Spans.of(chunks, overlap=True), normal(cu[-1], 1, 4)
    before = pool(values, spans, gate=values)
    for b in range(chunks.num_sequences):
        changed = values.clone()
        changed[cu[b] : cu[b + 1]] = float("nan")
        others = chunks.sequence_ids != b
        assert torch.equal(pool(changed, spans, gate=changed)[others], before[others])


def test_case_22_nothing_to_pool():
    for cu in ([0], [0, 0], [0, 0, 0]):
        chunks = Chunks.fixed(4, cu)
        values = normal(0, 2, 6, grad=True)
        entries = pool(values, Spans.of(chunks, overlap=True), gate=values)
        assert entries.shape == (0, 2, 3)
        entries.sum().backward()
        assert values.grad.shape == (0, 2, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(7, dtype=torch.float64)}, r"values: .*\[T, .., D\]"),
        ({"values": torch.zeros(7, 4, dtype=torch.int64)}, "values: expected a floating tensor"),
        ({"values": torch.zeros(7, 3)}, "values: expected 2D channels with overlap"),
        ({"gate": torch.zeros(6, 4)}, r"gate: .*broadcasts to \[7, 4\]"),
        ({"slot_bias": torch.zeros(0, 4)}, "slot_bias: .*S >= 1"),
        ({"slot_bias": torch.zeros(3, 5)}, "slot_bias: .*broadcasts"),
        ({"norm": torch.zeros(4)}, r"norm: .*\[D\] with D = 2"),
        ({"rope": (torch.zeros(4, 2), torch.zeros(4, 2))}, "rope: expected at most 1 pairs"),
        ({"rope": (torch.zeros(3, 1), torch.zeros(4, 1))}, "rope .cosines.: .*N = 4"),
        ({"rows": torch.zeros(7)}, "rows: expected an int32 or int64 tensor"),
        ({"impl": "triton"}, "impl: expected 'reference' for tensors on 'cpu'"),
        ({"impl": "fast"}, "impl: expected one of None, 'reference'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    arguments = {"values": torch.zeros(7, 4), "spans": Spans.of(Chunks.fixed(2, 7), overlap=True)}
    with pytest.raises(ValueError, match=message):
        pool(**(arguments | changes))
