import json

import pytest
import torch

from dynchunk.attention import Midpoints, Rescored, Shifted
from dynchunk.boundaries import BoundaryRule, FixedStride
from dynchunk.lab import LabModel, Variant, make_variant
from dynchunk.lab.policies import CONTENTS, GRIDS, POLICIES
from dynchunk.lab.table import ROWS, runs_of
from dynchunk.lab.train import Training


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_and_survives_json(policy):
    variant = make_variant(policy)
    again = Variant.from_dict(json.loads(json.dumps(variant.as_dict())))
    assert again == variant
    model = LabModel(again)
    losses = model.losses(variant.task.draw(2, seed=0))
    losses.total.backward()
    assert torch.isfinite(losses.total)
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing


@pytest.mark.parametrize("stride", [2, 4, 6, 8, 12])
def test_a_grid_has_its_stride_and_no_token_is_unseen(stride):
    variant = make_variant("fixed", stride=stride, view="moved")
    policy = variant.config.policy(0)
    assert policy.boundaries == FixedStride(stride)
    assert policy.views[1] == Shifted(stride // 2)
    assert policy.window >= policy.min_window
    assert variant.task.gap >= policy.window


@pytest.mark.parametrize("policy", CONTENTS)
@pytest.mark.parametrize("view", ["one", "moved", "midpoints"])
def test_content_windows_leave_no_token_unseen(policy, view):
    for task in ("even", "uneven"):
        variant = make_variant(policy, view=view, overlap=True, task=task)
        built = variant.config.policy(0)
        assert built.window >= built.min_window
        assert variant.task.gap >= built.window
        assert not built.allow_unseen


def test_hash_boundaries_reach_the_ratio_asked_for():
    for stride in (3, 4, 5, 6, 8):
        variant = make_variant("hash", stride=stride)
        batch = variant.task.draw(32, seed=5, prefix=0)
        (views, _) = LabModel(variant).chunks(batch.tokens)
        assert views[0].ratio == pytest.approx(stride, rel=0.06)


def test_views_and_sharing():
    hashed = make_variant("hash", view="second").config.policy(0)
    assert isinstance(hashed.views[1], Rescored)
    assert hashed.views[1].score != hashed.score
    assert isinstance(make_variant("class", view="midpoints").config.policy(0).views[1], Midpoints)
    own = make_variant("router", per_layer=True)
    assert own.config.plan.leaders == (0, 1)
    assert make_variant("router").config.plan.leaders == (0, 0)
    layers = make_variant("staggered-layers").config
    assert [layers.policy(layer).boundaries.offset for layer in (0, 1)] == [0, 2]


def test_told_boundaries_start_at_pairs():
    variant = make_variant("class", task="uneven-keys-2")
    batch = variant.task.draw(3, seed=0)
    chunks = LabModel(variant).chunks(batch.tokens)[0][0]
    at = batch.positions + batch.tokens.shape[1] * torch.arange(3)[:, None]
    assert bool(torch.isin(at, chunks.starts).all())
    assert isinstance(variant.config.policy(0).boundaries, BoundaryRule)


def test_rows_have_names_of_their_own():
    names = [row.variant.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {"full", "fixed-4", "fixed-12", "fixed-4-staggered", "learned-4-midpoints"} <= set(names)
    policies = {row.policy for row in ROWS}
    assert policies == set(POLICIES)
    assert set(GRIDS) <= policies
    runs = runs_of(ROWS, Training())
    assert len(runs) == sum(row.seeds for row in ROWS)
    assert len({(variant.name, training.seed) for variant, training in runs}) == len(runs)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("fixd", {}, "policy: expected one of 'full', 'fixed'.* got 'fixd'"),
        ("fixed", {"stride": 0}, "stride: expected an integer >= 1, got 0"),
        ("class", {"stride": 1}, "stride: expected a ratio of at least 2"),
        ("hash", {"stride": 12, "max_length": 9}, "ratio: expected a number in"),
        ("learned", {"stride": 9, "max_length": 9}, "stride: expected less than max_length = 9"),
        ("router", {"stride": 12, "max_length": 12}, "stride: expected less than max_length = 12"),
        ("fixed", {"view": "two"}, "view: expected one of 'one', 'second', 'moved', 'midpoints'"),
        ("fixed", {"view": "midpoints"}, "view: expected 'one' or 'moved' on a grid"),
        ("class", {"view": "second"}, "view: expected another one for these boundaries"),
        ("full", {"view": "moved"}, "view: expected 'one' without chunks"),
        ("full", {"overlap": True}, "overlap: expected a policy with chunks and a gated pool"),
        ("mean", {"overlap": True}, "overlap: expected a policy with chunks and a gated pool"),
        ("hash", {"per_layer": True}, "per_layer: expected learned boundaries, got 'hash'"),
        ("fixed", {"max_length": 6}, "max_length: expected content boundaries, got 'fixed'"),
        ("fixed", {"task": "odd"}, "task: expected one of 'even', 'uneven'"),
    ],
)
def test_bad_variants(policy, options, message):
    with pytest.raises(ValueError, match=message):
        make_variant(policy, **options)
