"""``dynchunk audit`` and ``dynchunk lab`` as their users run them, on untrained small models."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from dynchunk.audit import GapTest, PeriodTest, PhaseReport
from dynchunk.cli import app
from dynchunk.lab import RecallTask, checkpoint, make_variant
from dynchunk.lab.model import LabModel
from dynchunk.lab.train import Training

TASK = RecallTask(pairs=6, queries=4, context=48, keys=12, values=8, fillers=4)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


@pytest.fixture
def file(tmp_path):
    variant = make_variant("fixed")
    config = replace(variant.config, vocab=TASK.vocabulary, dim=16, head_dim=8, mlp_dim=16)
    model = LabModel(replace(variant, task=TASK, config=config))
    checkpoint.save(model, Training(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def report(accuracy, period, p=0.0005):
    trials = (1_000,) * 24
    phases = GapTest(
        tuple(range(24)), tuple(int(1_000 * a) for a in accuracy), trials, null95=0.04, p=p
    )
    return PhaseReport(phases, PeriodTest(period, 0.0005, 0.9), 0.5, 4.0)


GRID = report(np.where(np.arange(24) % 4 == 3, 0.02, 0.9), 4)
FLAT = report(np.full(24, 0.95), None, p=0.6)


@pytest.fixture
def known(monkeypatch):
    """Reports of known models in place of measured ones."""
    reports = {}
    monkeypatch.setattr("dynchunk.cli.audit._audit", lambda paths, seed, show: reports)
    return reports


def test_a_checkpoint_is_audited_by_path_and_by_folder(file):
    data = json.loads(run("audit", file, file.parent, "--json").stdout)
    assert list(data["targets"]) == ["fixed-4", f"fixed-4 ({file.parent})"]
    for target in data["targets"].values():
        assert target["ratio"] == pytest.approx(4, rel=0.05)
        assert len(target["accuracy"]) == 24
        assert 0 <= target["mean"] < 0.4  # untrained
        assert target["verdict"] == "no dependence on phase"


def test_exit_code_and_sentence_name_the_defect(known):
    known |= {"fixed-4": GRID, "full": FLAT}
    text = " ".join(run("audit", "x", code=1).stdout.split())
    assert text.endswith(
        "fixed-4 recalls a fact 90% of the time at its best position and 2% at its worst, again "
        "every 4 tokens: a few tokens put in front of a prompt change 50% of its answers. full: no "
        "such weak spot."
    )
    assert "depends on phase" in text
    run("audit", "x", "--max-gap", 0.9, code=0)
    targets = json.loads(run("audit", "x", "--json", code=1).stdout)["targets"]
    assert targets["fixed-4"]["period"] == 4
    assert targets["full"]["period"] is None


def test_no_defect_is_said_too(known):
    known["full"] = FLAT
    text = " ".join(run("audit", "x").stdout.split())
    assert text.endswith("made no difference above 10% to what any of these models recalls of it.")


def test_a_figure_is_drawn(known, tmp_path):
    known |= {"fixed-4": GRID, "full": FLAT}
    run("audit", "x", "--plot", tmp_path / "audit.png", code=1)
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_bad_checkpoints_are_one_clear_error(file):
    whole = file.read_bytes()
    cases = {
        "truncated, or no safetensors file": whole[:500],
        "written in version '7' of the format": whole.replace(b'"version":"1"', b'"version":"7"'),
        "a safetensors file, but not of a lab model": whole.replace(
            b"dynchunk.lab", b"dynchunk.LAB"
        ),
    }
    for message, content in cases.items():
        file.write_bytes(content)
        result = run("audit", file, code=2)
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert "expected a file that exists" in run("audit", "no/such", code=2).stderr
    assert "max_gap: expected a share in [0, 1]" in run("audit", "x", "--max-gap", 7, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fixd"], "policy: expected one of 'full', 'fixed'"),
        (["--policy", "hash", "--stride", 12, "--max-length", 9], "ratio: expected a number in"),
        (["--policy", "fixed", "--optimizer", "sgd"], "optimizer: expected one of"),
        (["--policy", "fixed", "--task", "odd"], "task: expected one of 'even'"),
        (["--policy", "fixed", "--steps", 0], "steps: expected an integer >= 1"),
    ],
)
def test_bad_training_is_one_clear_error(arguments, message, tmp_path):
    result = run("lab", "train", *arguments, "--folder", tmp_path, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_one_run_and_the_table_that_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr("dynchunk.lab.table.evaluate", _quick_evaluate)
    one = run("lab", "train", "--policy", "fixed", "--steps", 2, "--folder", tmp_path, "--json")
    line = json.loads(one.stdout)
    assert line["variant"] == "fixed-4"
    kept = tmp_path / "fixed-4" / "seed-0" / "model.safetensors"
    before = kept.stat().st_mtime_ns
    options = ("--only", "fixed-4", "--only", "ful?", "--steps", 2, "--seeds", 1)
    text = run("lab", "table", *options, "--folder", tmp_path).stdout
    assert "fixed-4" in text
    assert kept.stat().st_mtime_ns == before
    with (tmp_path / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [row["variant"] for row in lines] == ["full", "fixed-4"]
    assert next(row for row in lines if row["variant"] == "fixed-4")["mean"] == str(line["mean"])
    runs = json.loads((tmp_path / "table.json").read_text())
    assert len(runs) == len(lines)
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    run("lab", "table", "--only", "f*-4", "--steps", 2, "--finished", "--folder", tmp_path)
    assert len(json.loads((tmp_path / "table.json").read_text())) == 1
    nothing = run("lab", "table", "--finished", "--folder", tmp_path / "empty", code=2)
    assert "folder: expected at least one finished run" in nothing.stderr
    assert "only: expected a pattern of one of full, fixed-1-overlap, fixed-4" in (
        run("lab", "table", "--only", "xyz", "--folder", tmp_path, code=2).stderr
    )


def _quick_evaluate(model, task, *, phases, progress):
    from dynchunk.lab.evaluate import evaluate

    return evaluate(model, task, phases=phases, repeats=1, moved=24, flips=48, progress=progress)
