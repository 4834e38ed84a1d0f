"""Evaluation against models whose defects are known."""

import json

import pytest
import torch

from dynchunk.audit import PhaseReport
from dynchunk.boundaries import FixedStride, HashScore
from dynchunk.chunks import Chunks
from dynchunk.lab import Evaluation, RecallTask, evaluate

TASK = RecallTask()


class Recall:
    """Reads the value after the first occurrence of a key, unless a defect forgets it."""

    def __init__(self, forgets=None, rule=None):
        self.forgets, self.rule = forgets, rule

    def answer(self, tokens, asked_at):
        keys = tokens.gather(1, asked_at)
        at = (tokens[:, None] == keys[..., None]).int().argmax(-1)
        values = tokens.gather(1, at + 1)
        if self.forgets is not None:
            values = values.where(~self.forgets(at, keys, values), 0)
        return values

    def chunks(self, tokens):
        if self.rule is None:
            return ()
        cu = tokens.shape[1] * torch.arange(len(tokens) + 1)
        scores = HashScore(2)(tokens.flatten(), cu)
        view = self.rule(scores, cu)
        return ((view,), (view,))


def run(model, phases=4, **options):
    return evaluate(
        model, TASK, phases=phases, **{"repeats": 1, "moved": 48, "flips": 48, **options}
    )


def noise(keys, values, share):
    """A forgetting that depends on the pair alone, the same wherever it stands."""
    return (keys * 2_654_435_761 + values * 40_503) % 1_000 < 1_000 * share


def test_a_perfect_model():
    found = run(Recall())
    assert found.natural.mean == found.moved.mean == 1
    assert found.natural.gap == found.moved.gap == found.flip_rate == 0
    assert found.period.period is None
    assert found.content_sd == 0
    assert (found.ratio, found.slots, found.agreement) == (1, None, None)
    assert found.report().verdict() == "no dependence on phase"


@pytest.mark.parametrize("stride", [4, 6, 8, 12])
def test_a_grid_that_forgets_its_last_slot(stride):
    def straddles(at, keys, values):
        return at % stride == stride - 1

    found = run(Recall(straddles, FixedStride(stride)), phases=stride)
    assert found.natural.gap == found.moved.gap == 1
    assert found.natural.worst == found.moved.worst == stride - 1
    assert found.period.period == stride
    assert found.slots.worst == stride - 1
    assert found.ratio == pytest.approx(stride, rel=0.02)
    assert all(share == 0 for shift, share in enumerate(found.flips, 1) if shift % stride == 0)
    expected = 2 / stride
    assert found.flips[0] == pytest.approx(expected, abs=0.05)
    assert found.content_sd < 0.1
    report = found.report()
    assert report.is_defect()
    assert report.verdict() == "depends on phase"


def test_content_that_is_forgotten_is_no_defect_of_phase():
    found = run(Recall(lambda at, keys, values: noise(keys, values, 0.4)))
    assert found.natural.p > 0.01
    assert found.moved.gap == 0
    assert found.period.period is None
    assert found.flip_rate == 0
    assert found.content_sd == pytest.approx(0.24**0.5, abs=0.03)


def test_a_small_defect_is_called_small():
    def slightly(at, keys, values):
        return (at % 4 == 3) & noise(keys, values, 0.06)

    report = run(Recall(slightly), repeats=4).report()
    assert report.phases.is_significant
    assert not report.is_defect()
    assert report.verdict() == "small dependence on phase"
    assert report.period.period == 4


def test_layers_that_disagree():
    class TwoLayers(Recall):
        def chunks(self, tokens):
            cu = tokens.shape[1] * torch.arange(len(tokens) + 1)
            return ((Chunks.fixed(4, cu),), (Chunks.fixed(4, cu, 2),))

    found = run(TwoLayers(), moved=0, flips=48)
    assert found.moved is None
    assert found.agreement.f1 == 0
    assert 0 < found.agreement.chance < 1


def test_an_evaluation_survives_json():
    found = run(Recall(lambda at, keys, values: at % 4 == 3, FixedStride(4)))
    again = Evaluation.from_dict(json.loads(json.dumps(found.as_dict())))
    assert again == found


def test_the_report_has_what_the_audit_prints():
    report = run(Recall()).report()
    assert isinstance(report, PhaseReport)
    data = json.loads(json.dumps(report.as_dict()))
    assert {
        "accuracy",
        "mean",
        "gap",
        "null95",
        "p",
        "period",
        "flip_rate",
        "ratio",
        "verdict",
    } <= (set(data))
    assert len(data["accuracy"]) == 24
