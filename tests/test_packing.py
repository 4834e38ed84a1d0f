import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynchunk import BoundaryRule, Chunks, pack, plan_tiles, unpack
from dynchunk.packing import ORDERS, TILES
from dynchunk.testing.strategies import rules, scores

tiles = st.sampled_from(TILES)
orders = st.sampled_from(ORDERS)


@st.composite
def batches(draw: st.DrawFn) -> Chunks:
    rows = draw(st.lists(scores(max_tokens=60), min_size=1, max_size=4))
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0)
    if draw(st.booleans()):
        return draw(rules())(torch.cat(rows), cu)
    return Chunks.fixed(draw(st.integers(1, 50)), cu)  # also longer than a tile


@given(batches(), tiles, orders)
def test_unpack_is_the_exact_inverse_and_padding_is_zero(chunks, tile, order):
    x = torch.randn(chunks.num_tokens, 3)
    packed = pack(x, chunks, tile, order)
    assert torch.equal(unpack(packed), x)
    assert not packed.rows[packed.segment_ids < 0].any()
    assert packed.tiles.shape == (packed.plan.num_tiles, tile, 3)
    assert packed.utilisation == (len(x) / packed.plan.num_rows if len(x) else 1.0)


@given(batches(), tiles, orders)
def test_each_chunk_lies_whole_in_as_few_tiles_as_it_can(chunks, tile, order):
    plan = plan_tiles(chunks, tile, order)
    assert plan.num_rows % tile == 0
    used = set()
    for i, (row, length) in enumerate(
        zip(plan.chunk_rows.tolist(), chunks.lengths.tolist(), strict=True)
    ):
        rows = range(row, row + length)
        assert plan.row_of_token[chunks.ids == i].tolist() == list(rows)
        assert plan.segment_ids[row : row + length].tolist() == [i] * length
        assert used.isdisjoint(rows)
        used.update(rows)
        if length <= tile:
            assert row // tile == (row + length - 1) // tile
        else:
            assert row % tile == 0
            last = plan.segment_ids[row : row + -(-length // tile) * tile]
            assert set(last.tolist()) <= {i, -1}
    assert int((plan.segment_ids >= 0).sum()) == chunks.num_tokens
    if order == "stream":
        assert plan.row_of_token.tolist() == sorted(plan.row_of_token.tolist())


@given(batches(), tiles, orders)
def test_the_mask_joins_rows_of_one_chunk(chunks, tile, order):
    plan = plan_tiles(chunks, tile, order)
    tokens = plan.token_of_row.view(-1, tile).tolist()
    ids = chunks.ids.tolist()
    for mask, row_tokens in zip(plan.mask.tolist(), tokens, strict=True):
        for i, a in enumerate(row_tokens):
            for j, b in enumerate(row_tokens):
                assert mask[i][j] == (a >= 0 and b >= 0 and ids[a] == ids[b])


@given(batches(), tiles, orders)
def test_what_padding_rows_hold_never_shows(chunks, tile, order):
    x = torch.randn(chunks.num_tokens, 2)
    packed = pack(x, chunks, tile, order)
    poisoned = packed.rows.clone()
    poisoned[packed.segment_ids < 0] = torch.nan
    assert torch.equal(packed.plan.unpack(poisoned), x)


@given(batches(), tiles, orders)
def test_gradients_pass_through_both_ways(chunks, tile, order):
    x = torch.randn(chunks.num_tokens, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(plan_tiles(chunks, tile, order).num_rows, 2, dtype=torch.float64)
    packed = pack(x, chunks, tile, order)
    (grad,) = torch.autograd.grad((packed.rows * weight).sum(), x)
    assert torch.equal(grad, packed.plan.unpack(weight))
    rows = weight.clone().requires_grad_()
    (grad,) = torch.autograd.grad((packed.plan.unpack(rows) * x.detach()).sum(), rows)
    assert torch.equal(grad, packed.rows.detach())


def test_gradcheck():
    chunks = Chunks.from_lengths([3, 11, 2, 1])
    x = torch.randn(17, 2, dtype=torch.float64, requires_grad=True)
    for order in ORDERS:
        assert torch.autograd.gradcheck(lambda x, o=order: pack(x, chunks, 8, o).rows, (x,))
        assert torch.autograd.gradcheck(lambda x, o=order: unpack(pack(x, chunks, 8, o)), (x,))


def test_utilisation_at_a_ratio_of_about_5():
    """Published figures of docs/packing.md; `python benchmarks/packing.py` prints them all."""
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    chunks = BoundaryRule(radius=2, min_length=3, max_length=8)(x)
    assert chunks.ratio == pytest.approx(4.75, abs=0.05)
    used = {(o, t): plan_tiles(chunks, t, o).utilisation for o in ORDERS for t in TILES}
    assert used["best_fit", 16] >= 0.95
    assert used["best_fit", 32] >= 0.97
    assert used["stream", 16] >= 0.86
    assert used["stream", 32] >= 0.93
    assert all(used["best_fit", t] >= used["stream", t] for t in TILES)


def test_best_fit_is_not_misled_by_one_short_chunk():
    lengths = [
        1,
        *BoundaryRule(2, min_length=3, max_length=8)(torch.rand(50_000)).lengths[1:].tolist(),
    ]
    assert plan_tiles(Chunks.from_lengths(lengths), 16, "best_fit").utilisation > 0.99


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: pack(torch.zeros(9), c, 8), ValueError, "x: expected a tensor of 10 rows"),
        (lambda c: pack([0] * 10, c, 8), TypeError, "x: expected a tensor"),
        (lambda c: pack(torch.zeros(10), c, 12), ValueError, "tile: expected one of 8, 16, 32"),
        (lambda c: pack(torch.zeros(10), c, 8, "random"), ValueError, "order: expected one of"),
        (lambda c: plan_tiles(c.starts, 8), TypeError, "chunks: expected Chunks"),
        (lambda c: plan_tiles(c, 8).unpack(torch.zeros(10)), ValueError, "rows: expected a tensor"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(Chunks.fixed(4, 10))
