import pytest
import torch

from dynchunk import BoundaryRule

RULES = (
    BoundaryRule(0, threshold=0.5),
    BoundaryRule(1, threshold=0.7, max_length=9),
    BoundaryRule(5, min_length=3, max_length=7),
    BoundaryRule(5, min_length=3, max_length=7, ladder=True),
)
SCORES = {
    "float32": lambda: torch.rand(3000),
    "ties": lambda: torch.randint(0, 3, (3000,)).double(),
    "none": lambda: torch.zeros(0),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_cpu(rule, name):
    x = SCORES[name]()
    for cu in ([0, len(x)], [0, 0, len(x) // 3, len(x) // 3 + len(x) % 7, len(x)]):
        assert rule(x, cu, impl="triton").equal(rule(x, cu, impl="cpu"))
