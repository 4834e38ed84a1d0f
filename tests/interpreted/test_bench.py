"""The GPU benchmark's logic on tiny shapes: every operation that has kernels is compared."""

import pytest
import torch

from dynchunk.bench import correctness
from dynchunk.bench.problems import Maker, Sizes

TINY = Sizes(
    lengths=(9, 0, 14),
    heads=4,
    kv_heads=2,
    width=16,
    window=3,
    topk=3,
    index_heads=2,
    contexts=(1, 5, 0),
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_operations_are_correct(dtype):
    found = list(correctness.check(CPU, sizes=TINY, seed=0, dtypes=(dtype,)))
    assert {"pool", "pool_state", "gather_rows", "boundaries"} <= {x.operation for x in found}
    assert any(x.output.startswith("gradient") for x in found)
    assert [x for x in found if not x.ok] == []


def test_a_wrong_result_is_seen():
    problem = Maker(TINY, torch.float32, CPU).pool("gate")
    wrong = problem._replace(
        call=lambda x, impl: (problem.call(x, impl)[0] * (1 if impl == "reference" else 1.001),)
    )
    checks = list(correctness.compare(wrong, torch.float32))
    assert not any(check.ok for check in checks)
    assert correctness.error(torch.tensor([1.0, torch.nan]), torch.ones(2)) != 0
    nan = correctness.Check("", "", "", "", float("nan"), 1.0)
    assert not nan.ok
