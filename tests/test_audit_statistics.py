import numpy as np
import pytest
from scipy import stats

from dynchunk.audit.statistics import (
    fold,
    gap_test,
    period_test,
    spread_beyond_noise,
    wilson,
)


def is_uniform(p_values):
    return stats.kstest(p_values, "uniform").pvalue > 0.001


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# Gaps


def test_gap_p_values_are_uniform_under_the_null(rng):
    phases = rng.integers(0, 24, 2_400)
    tests = [gap_test(rng.random(2_400) < 0.9, phases, draws=400, seed=seed) for seed in range(300)]
    assert is_uniform([test.p for test in tests])
    above = np.mean([test.gap > test.null95 for test in tests])
    assert 0.02 < above < 0.09


def test_gaps_of_clusters_of_unequal_difficulty(rng):
    """Sequences that are nearly all right or all wrong: trials are far from independent."""
    phases = np.tile(np.arange(24), (60, 1))
    p_values, pooled = [], []
    for seed in range(200):
        easy = rng.choice([0.05, 0.95], 60)
        correct = rng.random((60, 24)) < easy[:, None]
        p_values.append(gap_test(correct, phases, draws=200, seed=seed).p)
        pooled.append(gap_test(correct.ravel(), phases.ravel(), draws=200, seed=seed).p)
    assert np.mean(np.array(p_values) < 0.05) < 0.09
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.15)  # gaps of 1/60 tie often
    assert np.mean(pooled) > 0.9  # pooled, the null is far too wide


def test_a_defect_of_one_phase_is_found(rng):
    phases = rng.integers(0, 4, 4_000)
    correct = rng.random(4_000) < np.where(phases == 3, 0.8, 0.9)
    test = gap_test(correct, phases)
    assert test.is_significant
    assert test.worst == 3
    assert test.gap == pytest.approx(0.1, abs=0.04)
    assert test.null95 < 0.05
    assert test.mean == pytest.approx(0.875, abs=0.02)


def test_perfect_accuracy_has_no_gap():
    test = gap_test(np.ones(100, bool), np.arange(100) % 4)
    assert (test.gap, test.null95, test.p, test.is_significant) == (0, 0, 1, False)


def test_groups_of_few_trials_are_left_out():
    correct = np.array([True] * 50 + [False] + [True] * 50)
    test = gap_test(correct, np.repeat([0, 1, 5], [50, 1, 50]), min_trials=10)
    assert test.groups == (0, 5)
    assert test.gap == 0


# Periods


def profile(rng, chance, trials=500):
    return rng.binomial(trials, np.clip(chance, 0, 1)) / trials


@pytest.mark.parametrize("span", [24, 48])
@pytest.mark.parametrize("period", [4, 6, 8])
def test_a_bad_slot_gives_its_stride(rng, period, span):
    chance = 0.8 - 0.3 * (np.arange(span) % period == period - 1)
    found = [period_test(profile(rng, chance), draws=500).period for _ in range(20)]
    assert found == [period] * 20


@pytest.mark.parametrize("period", [4, 6, 8, 12])
def test_small_defects_are_found_in_48_positions(rng, period):
    x = np.arange(48)
    chance = 0.8 - 0.1 * (x % period == period - 1) - 0.05 * np.cos(2 * np.pi * x / period)
    found = [period_test(profile(rng, chance), draws=500).period for _ in range(20)]
    assert found.count(period) >= 19


def test_twelve_needs_more_than_two_repeats(rng):
    chance = 0.8 - 0.3 * (np.arange(48) % 12 == 11)
    assert period_test(profile(rng, chance)).period == 12
    assert period_test(profile(rng, chance[:24])).period is None


@pytest.mark.parametrize("period", [6, 8, 12])
def test_a_strong_harmonic_does_not_hide_the_stride(rng, period):
    """Most of the power at half the stride, as measured at r = 6 (.65 at 3, .20 at 6)."""
    x = 2 * np.pi * np.arange(48) / period
    chance = 0.7 + 0.16 * np.cos(2 * x) + 0.09 * np.cos(x)
    found = [period_test(profile(rng, chance), draws=500).period for _ in range(20)]
    assert found == [period] * 20


@pytest.mark.parametrize("trend", [0.0, 0.15])
def test_without_a_period_p_values_are_uniform(rng, trend):
    chance = 0.8 + trend * np.linspace(0, 1, 48) ** 2
    tests = [period_test(profile(rng, chance), draws=400, seed=seed) for seed in range(300)]
    assert is_uniform([test.p for test in tests])
    assert np.mean([test.period is not None for test in tests]) < 0.035


def test_a_flat_profile_has_no_period():
    assert period_test(np.ones(48)).period is None


@pytest.mark.parametrize(
    "accuracy", [np.ones(6), np.full(24, np.nan), np.ones((2, 24)), np.ones(13)]
)
def test_bad_profiles(accuracy):
    with pytest.raises(ValueError, match="accuracy: expected"):
        period_test(accuracy)


# The rest


def test_spread_beyond_noise_measures_what_was_put_in(rng):
    groups = np.arange(1_000)[:, None].repeat(16, 1)
    nothing = [spread_beyond_noise(rng.random((1_000, 16)) < 0.6, groups) for _ in range(20)]
    assert np.mean(nothing) < 0.025
    of_group = rng.normal(0.6, 0.1, 1_000)
    assert spread_beyond_noise(rng.random((1_000, 16)) < of_group[:, None], groups) == (
        pytest.approx(0.1, abs=0.015)
    )
    assert spread_beyond_noise([True], [0]) == 0


def test_fold():
    assert fold([True, False, True], [0, 1, 49], 48)[:2].tolist() == [1.0, 0.5]
    assert np.isnan(fold([True], [0], 24)[1])


def test_wilson_covers(rng):
    correct = rng.binomial(50, 0.95, 2_000)
    covered = [low <= 0.95 <= high for low, high in (wilson(int(c), 50) for c in correct)]
    assert 0.92 < np.mean(covered) < 0.99
    assert wilson(0, 0) == (0, 1)
