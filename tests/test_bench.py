"""The benchmarks run, and say what they measured."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dynchunk.cli import app, bench

SMALL = {
    "decode": ["--context", "600", "--ratio", "4"],
    "prefill": ["--tokens", "256", "512"],
    "memory": ["--tokens", "256"],
    "train": ["--tokens", "128", "256"],
    "streaming": ["--lengths", "100", "200"],
    "wrap": ["--context", "100", "--layers", "1", "--policy", "fixed 4"],
}


@pytest.mark.parametrize("name", SMALL)
def test_small_runs_print_rows(name):
    if name in ("prefill", "memory", "streaming", "wrap"):
        pytest.importorskip("transformers", minversion="5.24")
    script = bench._FOLDER / f"{name}.py"
    command = [sys.executable, script, "--json", "--repetitions", "1", *SMALL[name]]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(out)["rows"]
    assert rows
    for row in rows:
        assert any(value and "ours" in key for key, value in row.items())
        if row.get("relative RMS"):
            assert float(row["relative RMS"]) < 1e-5


def test_without_a_source_tree_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_FOLDER", tmp_path)
    result = CliRunner().invoke(app, ["bench", "decode"])
    assert result.exit_code == 2
    assert "run from a source tree" in result.stderr


def test_the_command_passes_options_on():
    command = [sys.executable, "-c", "from dynchunk.cli import main; main()", "bench", "train"]
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--tokens" in result.stdout
