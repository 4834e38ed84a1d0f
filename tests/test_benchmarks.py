"""The scripts in benchmarks/ run, on the smallest sizes, and print what they measured."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield
    torch.set_grad_enabled(True)
    for name in ("streaming", "memory", "wrap_v4", "v4_layer", "common"):
        sys.modules.pop(name, None)


def test_streaming_measures_every_cache_beside_its_peers(capsys):
    import streaming

    torch.set_grad_enabled(False)
    arguments = Namespace(lengths=[1000, 2000], tokens=2, every=2, back=1, repetitions=1)
    result = streaming.measure(arguments)
    peers = [set(row["peers"]) for row in result["rows"][:4]]
    assert peers == [{"buffer", "DynamicCache"}] * 2 + [{"V4 cache"}] * 2
    for row in result["rows"]:
        assert row["ours"] > 0
        assert row["ours_bytes"] > 0
        assert min(row["peers_bytes"].values()) > 0
    streaming.show(result, arguments)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("fixed", "content", "V4 csa", "V4 hca"))


@pytest.mark.parametrize("work", ["cache", "csa cache", "hca cache"])
def test_memory_fills_a_cache_of_ours_and_of_theirs(work):
    import memory

    for who in ("ours", "theirs"):
        cache = memory.prepared(work, who, 2048)()
        assert 0 < memory.held_bytes(cache) < 2048 * 8 * 64 * 2 * 4 + 1


def test_what_transformers_would_take_is_the_parabola_through_the_largest_sizes():
    import wrap_v4

    measured = {n: 1 + n**2 / 2**20 for n in (1024, 2048, 4096, 8192)}
    assert wrap_v4.extrapolated(measured, 32768) == pytest.approx(1 + 2**30 / 2**20)
