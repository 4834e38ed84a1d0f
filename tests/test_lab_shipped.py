"""The checkpoints in the package are those of the study, and load."""

import json

import pytest
import torch

from dynchunk.lab import checkpoint
from dynchunk.lab.shipped import HOME, NAMES, ship, shipped


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_a_shipped_checkpoint_is_what_its_name_says(path):
    model, training = checkpoint.load(path)
    log = json.loads(path.with_suffix(".json").read_text())
    assert model.variant.name == path.stem == log["variant"]["name"]
    assert log["training"] == training
    assert len(log["steps"]) == training["steps"]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_they_are_small():
    files = list(HOME.iterdir())
    assert {path.stem for path in files} == set(NAMES)
    assert sum(path.stat().st_size for path in files) < 6_000_000


def test_shipping_needs_finished_runs(tmp_path):
    with pytest.raises(ValueError, match=f"folder: expected a finished run of {NAMES[0]}"):
        ship(tmp_path)
