"""What trials of a study add up to, against oracles that share nothing with it: brute force, and scipy's bootstrap."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.errors import UsageError
from distbelief.lab.study.definition import hardness, parse_target
from distbelief.lab.study.trials import MISSED, Point, Trial, median, ratio_of_medians

TIMES = st.lists(st.one_of(st.just(MISSED), st.floats(0.1, 1e6)), min_size=1, max_size=9)


@given(TIMES)
def test_a_miss_is_infinite_in_the_median_and_moves_it_as_any_late_time_would(times: list[float]) -> None:
    late = sorted(1e300 if math.isinf(one) else one for one in times)
    middle = float(np.median(late))
    assert median(times) == (math.inf if middle > 1e200 else pytest.approx(middle))


@pytest.mark.parametrize("reached", range(6))
def test_three_of_five_make_a_median_and_two_do_not(reached: int) -> None:
    times = [float(seconds) for seconds in range(1, reached + 1)] + [MISSED] * (5 - reached)
    assert (median(times) < MISSED) == (reached >= 3)


@given(st.lists(st.sampled_from([0.1, 0.5, 0.9]), max_size=7), st.sampled_from([0.4, 0.5, 0.95]))
def test_a_target_is_reached_by_the_first_of_two_evaluations_in_a_row(values: list[float], target: float) -> None:
    points = [Point(float(at), at / 2, 0, 0, 1 - value, value, 2 - value) for at, value in enumerate(values)]
    trial = Trial(arm="a", seed=0, command="", task="t", strategy="single", place="local", points=points)
    expected = next((at for at, pair in enumerate(itertools.pairwise(values)) if min(pair) >= target), MISSED)
    for same in (target, f"loss={1 - target + 1e-9}", f"training-loss={2 - target + 1e-9}"):
        assert (trial.until(same), trial.until(same, "epochs")) == (expected, expected / 2)


def test_a_loss_that_was_not_measured_is_not_held() -> None:
    points = [Point(1.0, 1.0, 1, 1, math.nan, 0.9), Point(2.0, 2.0, 2, 2, 0.01, 0.9)]
    trial = Trial(arm="a", seed=0, command="", task="t", strategy="single", place="local", points=points)
    assert trial.until("loss=0.1") == trial.until("training-loss=10") == MISSED


def test_the_hardest_of_a_kind_is_the_last_and_accuracies_are_behind_losses() -> None:
    targets = [0.9, "loss=0.1", 0.8, "training-loss=0.05", "loss=0.2", "training-loss=0.5"]
    assert sorted(targets, key=hardness) == [
        "training-loss=0.5", "training-loss=0.05", "loss=0.2", "loss=0.1", 0.8, 0.9
    ]  # fmt: skip


@pytest.mark.parametrize("target", ["loss=-1", "loss=0", "lost=0.1", "loss", 0.0, 1.0, "97", "loss=nan", "loss=1e999"])
def test_what_is_no_target_is_refused(target: str | float) -> None:
    with pytest.raises(UsageError, match="is neither a test accuracy from 0 to 1"):
        parse_target(target)


def test_the_interval_is_that_of_scipys_percentile_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy import stats  # a second, which only who runs this shall wait for

    monkeypatch.setattr("distbelief.lab.study.trials.RESAMPLES", 20_000)

    chance = random.Random(5)
    baseline, times = ([chance.lognormvariate(mean, 0.4) for _ in range(15)] for mean in (2.0, 1.0))
    found = ratio_of_medians(baseline, times)
    theirs = stats.bootstrap(
        (baseline, times), lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis), n_resamples=20_000,
        method="percentile", confidence_level=0.95, rng=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert found.ratio == pytest.approx(float(np.median(baseline) / np.median(times)))
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=0.05)


def test_an_interval_knows_what_was_missed() -> None:
    """An arm of which three in five reach the target may not, with other seeds: it may be infinitely slower."""
    found = ratio_of_medians([4.0] * 5, [2.0, 2.0, 2.0, MISSED, MISSED])
    assert (found.low, found.ratio, found.high) == (0.0, 2.0, 2.0)
    slow = ratio_of_medians([4.0, 4.0, 4.0, MISSED, MISSED], [2.0] * 5)
    assert (slow.low, slow.ratio, slow.high) == (2.0, 2.0, math.inf)
    neither = ratio_of_medians([MISSED] * 3, [MISSED] * 3)
    assert (neither.low, neither.high) == (0.0, math.inf)
    assert math.isnan(neither.ratio)


def test_the_same_times_have_the_same_interval() -> None:
    times = [1.0, 2.0, 3.0, 4.0]
    assert ratio_of_medians(times, times) == ratio_of_medians(times, times)
    assert ratio_of_medians(times, times) != ratio_of_medians(times, [1.0, 2.0, 3.0, 9.0])
