"""Where the host would wait for a GPU: operations whose result or size it has to read."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynchunk.boundaries import BoundaryRule, HashScore

aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Lists the calls that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        sized = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        masked = func in (aten.index.Tensor, aten.index_put_.default) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        reads = func in (
            aten._local_scalar_dense.default,
            aten.nonzero.default,
            aten.masked_select.default,
            aten.bincount.default,
            aten.unique_dim.default,
            aten._unique2.default,
        )
        if sized or masked or reads:
            self.found.append(func.__name__)
        return func(*args, **kwargs)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 100, 100, 300]])
@pytest.mark.parametrize("ladder", [False, True])
def test_boundaries_wait_for_two_sizes_that_depend_on_the_scores(ladder, cu_seqlens):
    rule = BoundaryRule(5, min_length=3, max_length=7, ladder=ladder)
    scores = torch.rand(300)
    with Waits() as waits:
        chunks = rule(scores, cu_seqlens, impl="reference")
    assert waits.found == ["nonzero.default", "repeat_interleave.Tensor"]
    assert chunks.equal(rule(scores, cu_seqlens, impl="cpu"))


def test_a_hash_score_does_not_wait():
    tokens = torch.randint(0, 99, (300,))
    with Waits() as waits:
        HashScore(4)(tokens, [0, 100, 300])
    assert waits.found == []


def test_the_mode_sees_what_it_should():
    x, is_high = torch.rand(9), torch.tensor([True, False, True])
    with Waits() as waits:
        int(x.argmax())
        x[:3][is_high]
        torch.repeat_interleave(torch.tensor([1, 2]))
        is_high.nonzero()
    assert len(waits.found) == 4
