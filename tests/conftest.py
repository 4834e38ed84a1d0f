"""Two hypothesis profiles: ``ci`` (default) and ``nightly`` (HYPOTHESIS_PROFILE=nightly)."""

import os
from importlib.util import find_spec

# Small tensors gain nothing from threads, and lose much where others use the cores too. Set before
# torch is loaded, for the processes that tests start as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Only the process that tests/test_interpreted.py starts may run these.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
if find_spec("triton") is None:  # it is not made for all platforms
    collect_ignore += ["test_offline.py", "test_triton_graphs.py"]

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=100, **_COMMON)
settings.register_profile("nightly", max_examples=2_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
