"""Policies: presets, dictionaries, what cannot be meant."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from attention_oracle import POLICIES
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.attention import (
    All,
    AsScored,
    GatedPool,
    Hash,
    Learned,
    MeanPool,
    Midpoints,
    ModelConfig,
    Policy,
    Rescored,
    Rope,
    Router,
    Shifted,
    TokenClasses,
    TopK,
    Yarn,
    csa,
    csa2,
    full,
    hca,
    sliding,
)
from dynchunk.boundaries import BoundaryRule, FixedStride, SharePlan
from dynchunk.testing.strategies import rules

scores = st.one_of(
    st.builds(Hash, st.integers(1, 4), st.integers(-3, 3)),
    st.builds(TokenClasses, st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    st.builds(Learned, st.integers(0, 3), st.sampled_from(["none", "log_p"])),
    st.builds(Router, st.floats(1.5, 9), st.sampled_from(["log_p", "straight_through"])),
)
views = st.one_of(st.just(AsScored()), st.just(Midpoints()), st.builds(Shifted, st.integers(-3, 3)))
shared_fields = {
    "reduction": st.one_of(
        st.builds(GatedPool, st.booleans(), st.booleans(), st.booleans()),
        st.builds(MeanPool, st.booleans(), st.booleans(), st.booleans()),
    ),
    "selection": st.one_of(st.just(All()), st.builds(TopK, st.integers(0, 9))),
    "cover": st.sampled_from(["window", "tail"]),
    "sink": st.booleans(),
    "rope": st.one_of(st.none(), st.builds(Rope, yarn=st.one_of(st.none(), st.just(Yarn())))),
    "window": st.one_of(st.none(), st.integers(0, 9)),
    "allow_unseen": st.just(True),
}
policies = st.one_of(
    st.builds(
        Policy,
        rules(),
        st.one_of(st.none(), scores),
        st.lists(st.one_of(views, st.builds(Rescored, scores)), min_size=1, max_size=3).map(tuple),
        **shared_fields,
    ),
    st.builds(
        Policy,
        st.builds(FixedStride, st.integers(1, 9)),
        st.none(),
        st.lists(views, min_size=1, max_size=3).map(tuple),
        **shared_fields,
    ),
    st.builds(Policy, **shared_fields),
)


@given(policies)
def test_a_policy_survives_json(policy):
    text = json.dumps(policy.as_dict(), allow_nan=False)
    again = Policy.from_dict(json.loads(text))
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.as_dict() == policy.as_dict()


@given(st.lists(policies, min_size=1, max_size=3).map(tuple))
def test_a_config_survives_json(pattern):
    config = ModelConfig(10, 8, len(pattern), 2, 1, pattern=pattern)
    plans = [None, SharePlan.every_layer(len(pattern))]
    for one in (replace(config, sharing=plan) for plan in plans):
        assert ModelConfig.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_presets_have_deepseeks_values():
    assert csa() == Policy(
        FixedStride(4),
        reduction=GatedPool(slot_bias=True, overlap=True, norm=True),
        selection=TopK(512, heads=64, dim=128),
        window=128,
        sink=True,
        rope=Rope(64 / 512, 160_000.0, Yarn(16.0, 65536, 32.0, 1.0)),
    )
    assert hca() == replace(
        csa(), boundaries=FixedStride(128), reduction=GatedPool(), selection=All()
    )
    assert csa2().boundaries == FixedStride(2)
    assert csa2().reduction == GatedPool(slot_bias=False, overlap=False)
    assert csa2().selection == TopK(512, heads=32, dim=128)
    assert sliding() == Policy(window=128, rope=Rope(64 / 512))
    assert (full().window, full().sink) == (None, False)
    assert all(p.rope.dims(512) == 64 for p in (csa(), hca(), csa2(), sliding()))
    assert csa().rope.for_index(512, 128).dims(128) == 64


def test_a_policy_is_frozen_and_prints_what_it_is():
    policy = POLICIES["learned"]
    with pytest.raises(FrozenInstanceError):
        policy.window = 3
    for part in ("BoundaryRule(radius=1", "Learned(reach=1", "Midpoints()", "window=10"):
        assert part in repr(policy)


@pytest.mark.parametrize(
    ("boundaries", "view", "least"),
    [
        (FixedStride(4), AsScored(), 4),
        (FixedStride(4), Shifted(2), 4),
        (FixedStride(4), Shifted(-2), 6),
        (FixedStride(4), Midpoints(), 6),
        (BoundaryRule(2, min_length=2, max_length=6), AsScored(), 9),
        (BoundaryRule(2, max_length=6), Midpoints(), 11),
        (BoundaryRule(0, max_length=3), Shifted(7), 7),
    ],
)
def test_a_window_that_leaves_tokens_unseen_has_to_be_allowed(boundaries, view, least):
    given = {"boundaries": boundaries, "views": (view,)}
    assert Policy(**given, window=least).min_window == least
    with pytest.raises(ValueError, match=f"window: expected at least {least}"):
        Policy(**given, window=least - 1)
    assert Policy(**given, window=least - 1, allow_unseen=True).window == least - 1
    assert Policy(**given, window=0, cover="tail").window == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Policies"}, "policy: kind: expected one of 'Policy', 'BoundaryRule'"),
        ({"version": 2}, "policy version: expected 1, got 2"),
        ({"version": None}, "policy version: expected 1, got None"),
        ({"windows": 3}, "policy: field of Policy: expected one of 'boundaries', 'score'"),
        ({"cover": "all"}, "cover: expected one of 'window', 'tail'"),
        ({"boundaries": {"kind": "Grid", "stride": 4}}, "kind: expected one of .*'FixedStride'"),
        ({"boundaries": {"kind": "FixedStride"}}, "boundaries: FixedStride: .*missing.*'stride'"),
        ({"boundaries": {"kind": "Hash"}}, "boundaries: expected one of BoundaryRule, FixedStride"),
        ({"selection": {"kind": "TopK", "k": -1}}, "k: expected an integer >= 0, got -1"),
        ({"views": []}, "views: expected at least one view"),
        ({"views": [3]}, "views: expected views of chunks, got 3"),
        ({"score": {"kind": "Hash"}}, "score: expected None for a fixed stride"),
        (
            {"views": [{"kind": "Rescored", "score": {"kind": "Hash"}}]},
            "views: expected no other score for a fixed stride",
        ),
        ({"rope": {"kind": "Rope", "fraction": 0.0}}, "fraction: expected a number in"),
        (
            {"boundaries": None, "views": [{"kind": "Midpoints"}, {"kind": "AsScored"}]},
            "views: expected one without boundaries",
        ),
    ],
)
def test_what_a_dictionary_cannot_mean(change, message):
    with pytest.raises(ValueError, match=message):
        Policy.from_dict(csa().as_dict() | change)


@pytest.mark.parametrize("data", [None, [], "csa", {"version": 1}])
def test_what_is_no_policy(data):
    with pytest.raises(ValueError, match="policy"):
        Policy.from_dict(data)


@pytest.mark.parametrize("credit", ["", "gumbel"])
def test_unknown_credit(credit):
    for spec in (Learned, Router):
        with pytest.raises(ValueError, match="credit: expected one of 'none', 'log_p'"):
            spec(credit=credit)
