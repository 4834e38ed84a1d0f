import pytest
import torch
from guards import guarded_memory
from ops_oracle import normal, random_layout

from dynchunk.chunks import Chunks
from dynchunk.packing import ORDERS, TILES, plan_tiles

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def tokens(*shape, dtype):
    return (normal(*shape) * 9).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", TILES)
def test_equals_the_reference_both_ways(tile, order, dtype):
    chunks = random_layout([0, 30, 30, 111])
    plan, x = plan_tiles(chunks, tile, order), tokens(111, 2, 3, dtype=dtype)
    with guarded_memory():
        rows = plan.pack(x, impl="triton").rows
    assert torch.equal(rows, plan.pack(x, impl="reference").rows)
    assert not rows[plan.segment_ids < 0].any()
    assert torch.equal(plan.unpack(rows, impl="triton"), x)


@pytest.mark.parametrize("width", [1, 80, 600])
@pytest.mark.parametrize("count", [0, 1, 63, 257])
def test_awkward_sizes(count, width):
    plan = plan_tiles(random_layout([0, count]), 16)
    x = tokens(count, width, dtype=torch.float32)
    with guarded_memory():
        rows = plan.pack(x, impl="triton").rows
    assert torch.equal(rows, plan.pack(x, impl="reference").rows)


def test_p5_what_padding_rows_hold_never_shows():
    plan = plan_tiles(Chunks.from_lengths([5, 4, 3]), 8)
    x = tokens(12, 4, dtype=torch.float32)
    rows = plan.pack(x, impl="triton").rows
    rows[plan.segment_ids < 0] = torch.nan
    assert torch.equal(plan.unpack(rows, impl="triton"), x)


def test_gradients_are_the_transpose():
    plan = plan_tiles(random_layout([0, 63]), 16, "best_fit")
    x = tokens(63, 5, dtype=torch.float32).requires_grad_()
    weight = tokens(plan.num_rows, 5, dtype=torch.float32).requires_grad_()
    packed = plan.pack(x, impl="triton").rows
    assert torch.equal(
        torch.autograd.grad(packed, x, weight.detach())[0], weight[plan.row_of_token]
    )
    unpacked = plan.unpack(weight, impl="triton")
    assert torch.equal(torch.autograd.grad(unpacked, weight, x.detach())[0], packed)
