"""The benchmarks run, and say what they measured."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from typer.testing import CliRunner

from dynchunk.cli import app, bench

SMALL = {
    "decode": ["--context", "600", "--ratio", "4"],
    "prefill": ["--tokens", "256", "512"],
    "memory": ["--tokens", "256", "--works", "attend", "csa cache"],
    "train": ["--tokens", "128", "256"],
    "streaming": ["--lengths", "100", "200"],
    "wrap": ["--context", "100", "--layers", "1", "--policy", "fixed 4"],
    "wrap-v4": ["--tokens", "200"],
}


@pytest.mark.parametrize("name", SMALL)
def test_small_runs_print_rows(name):
    if name in ("prefill", "memory", "streaming", "wrap", "wrap-v4"):
        pytest.importorskip("transformers", minversion="5.24")
    script = bench.script_of(name)
    command = [sys.executable, script, "--json", "--repetitions", "1", *SMALL[name]]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(out)["rows"]
    assert rows
    for row in rows:
        assert any(value and "ours" in key for key, value in row.items())
        if row.get("relative RMS"):
            assert float(row["relative RMS"]) < 1e-5


def test_streaming_prints_a_table_with_every_peer(monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.24")
    monkeypatch.syspath_prepend(str(bench._FOLDER))
    streaming = importlib.import_module("streaming")
    arguments = Namespace(lengths=[1000], tokens=2, every=2, back=1, repetitions=1)
    with torch.no_grad():
        result = streaming.measure(arguments)
    peers = [set(row["peers"]) for row in result["rows"]]
    assert peers == [{"buffer", "DynamicCache"}] * 2 + [{"V4 cache"}] * 2
    assert all(min(row["peers_bytes"].values()) > 0 for row in result["rows"])
    streaming.show(result, arguments)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("ceiling", "content", "V4 csa", "V4 hca"))
    assert all(row["ceiling"] > 0 for row in result["rows"])


def test_what_transformers_would_take_is_the_parabola_through_the_largest_sizes(monkeypatch):
    monkeypatch.syspath_prepend(str(bench._FOLDER))
    wrap_v4 = importlib.import_module("wrap_v4")
    measured = {n: 1 + n**2 / 2**20 for n in (1024, 2048, 4096, 8192)}
    assert wrap_v4.extrapolated(measured, 32768) == pytest.approx(1 + 2**10)
    assert wrap_v4.extrapolated({512: 2.0}, 32768) == 2.0


def test_without_a_source_tree_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_FOLDER", tmp_path)
    result = CliRunner().invoke(app, ["bench", "decode"])
    assert result.exit_code == 2
    assert "run from a source tree" in result.stderr


def test_the_command_passes_options_on():
    command = [sys.executable, "-c", "from dynchunk.cli import main; main()", "bench", "train"]
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--tokens" in result.stdout
