import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynchunk.lab import RecallTask, checkpoint, make_variant
from dynchunk.lab.train import LOG, MODEL, RESUME, Training, train

SMALL = RecallTask(pairs=4, queries=2, context=24, keys=8, values=8, fillers=4, period=4)


def small(policy="fixed", **options):
    variant = make_variant(policy, **options)
    config = replace(variant.config, vocab=SMALL.vocabulary, dim=16, head_dim=8, mlp_dim=16)
    return replace(variant, task=SMALL, config=config)


class StopHere(BaseException):
    pass


def interrupt_at(step):
    def tell(progress):
        if progress.step == step:
            raise StopHere

    return tell


def fast(**settings):
    return Training(**{"steps": 12, "batch": 4, "warmup": 3, **settings})


@pytest.mark.parametrize(
    ("variant", "optimizer"),
    [
        (small(), "adamw"),
        (small("random-offset"), "adamw"),
        (small("router", per_layer=True), "muon"),
    ],
    ids=["adamw", "random-offset", "muon"],
)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, variant, optimizer):
    training = fast(optimizer=optimizer, seed=3)
    whole = train(variant, training, tmp_path / "whole")
    for step in (5, 9):
        with pytest.raises(StopHere):
            train(variant, training, tmp_path / "parts", interrupt_at(step), keep_every=4)
    resumed_at = []
    parts = train(
        variant, training, tmp_path / "parts", lambda progress: resumed_at.append(progress.step)
    )
    assert resumed_at[0] == 9
    for name, x in whole.state_dict().items():
        assert torch.equal(x, parts.state_dict()[name]), name
    logs = [json.loads((tmp_path / part / LOG).read_text()) for part in ("whole", "parts")]
    assert logs[0]["steps"] == logs[1]["steps"]
    assert not (tmp_path / "parts" / RESUME).exists()


def test_training_learns_and_is_logged(tmp_path):
    train(small("full"), fast(steps=150, lr=1e-2), tmp_path)
    log = json.loads((tmp_path / LOG).read_text())
    losses = [loss for loss, _ in log["steps"]]
    assert len(losses) == 150
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert log["training"]["lr"] == 1e-2
    assert log["variant"]["name"] == "full"


def test_seeds_differ_and_repeat(tmp_path):
    def weights(seed, name):
        model = train(small(), fast(steps=3, seed=seed), tmp_path / name)
        return torch.cat([p.flatten() for p in model.parameters()])

    first, again, other = weights(0, "a"), weights(0, "b"), weights(1, "c")
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_finished_run_is_not_run_again(tmp_path):
    train(small(), fast(steps=2), tmp_path)
    steps = []
    train(small(), fast(steps=2), tmp_path, steps.append)
    assert steps == []


def test_a_folder_of_another_run_is_refused(tmp_path):
    train(small(), fast(steps=2), tmp_path)
    with pytest.raises(ValueError, match="holds a run of another lr, seed; choose another folder"):
        train(small(), fast(steps=2, lr=1e-3, seed=1), tmp_path)
    with pytest.raises(ValueError, match="holds a run of another config, name"):
        train(small("mean"), fast(steps=2), tmp_path)


def test_a_checkpoint_gives_the_same_answers(tmp_path):
    model = train(small("hash", view="midpoints"), fast(steps=2), tmp_path)
    again, training = checkpoint.load(tmp_path / MODEL)
    batch = SMALL.draw(4, seed=9)
    assert torch.equal(
        model.answer(batch.tokens, batch.asked_at), again.answer(batch.tokens, batch.asked_at)
    )
    assert training["steps"] == 2


def test_bad_checkpoints(tmp_path):
    train(small(), fast(steps=1), tmp_path)
    path = tmp_path / MODEL
    whole = path.read_bytes()
    weights = load_file(path)
    variant, training = small(), {}

    def fails(message):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(path)

    path.write_bytes(whole[: len(whole) // 2])
    fails("truncated, or no safetensors file")
    path.write_bytes(whole.replace(b'"version":"1"', b'"version":"7"'))
    fails("written in version '7' of the format, this dynchunk reads '1'")
    save_file(weights, path)
    fails("not of a lab model")
    checkpoint.write({"net.embedding.weight": torch.zeros(2, 2)}, path, variant, training, {})
    fails("weights that do not fit its variant")
    metadata = {"format": "dynchunk.lab", "version": "1", "variant": '{"name": "x"}'}
    save_file(weights, path, metadata)
    fails("a variant that cannot be read")
    path.unlink()
    fails("checkpoint: expected a file that exists")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer: expected one of 'adamw', 'muon', got 'sgd'"),
        ({"steps": 0}, "steps: expected an integer >= 1, got 0"),
        ({"lr": 0}, "lr: expected a number > 0, got 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Training(**settings)
