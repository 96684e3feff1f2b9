"""What trials add up to: medians in which a miss is infinite, intervals of ratios, and what a time is the product of.

Pure functions of numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

MISSED = math.inf
"""The time of a trial that did not reach the target."""
RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A ratio, and the bounds between which it lies with a confidence of 95 %."""

    low: float
    ratio: float
    high: float


def median(values: Sequence[float]) -> float:
    """The median, in which a miss is infinite; so more than half must reach a target for it to be finite.

    >>> median([3.0, 1.0, MISSED]), median([1.0, MISSED, MISSED]), median([1.0, MISSED])
    (3.0, inf, inf)
    """
    if not values:
        return math.nan
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def first_held(values: Sequence[float], target: float, lower: bool = False) -> int | None:
    """The index of the first of two evaluations in a row that hold a target; None where there are none.

    Args:
        values: of all evaluations, in order.
        target: that they are to be at least.
        lower: whether they are to be at most that.

    >>> first_held([0.8, 0.91, 0.89, 0.92, 0.9], 0.9), first_held([0.8, 0.91], 0.9)
    (3, None)
    """
    held = [value <= target if lower else value >= target for value in values]
    return next((index for index in range(len(held) - 1) if held[index] and held[index + 1]), None)


def speed_up(baseline: float, time: float) -> float:
    """How many times faster than the baseline; not a number, where neither reached the target.

    >>> speed_up(10.0, 4.0), speed_up(10.0, MISSED), speed_up(MISSED, 4.0)
    (2.5, 0.0, inf)
    """
    if math.isinf(baseline) and math.isinf(time):
        return math.nan
    return baseline / time if time else math.nan


def ratio_of_medians(
    baseline: Sequence[float], times: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The speed-up, as the ratio of the medians, with its percentile bootstrap interval (Efron 1979): each side's
    trials are drawn anew, with replacement, so many times.

    Where neither side of a draw reached the target, it counts as 0 for the lower bound and as infinite for the upper.

    Args:
        baseline: seconds of each trial of the baseline, a miss infinite.
        times: of the arm.
        seed: of the draws.
        resamples: how many.

    >>> ratio_of_medians([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    Interval(low=2.0, ratio=2.0, high=2.0)
    """
    if not baseline or not times:
        return Interval(math.nan, math.nan, math.nan)
    chance = random.Random(seed)
    drawn = [
        speed_up(median(chance.choices(baseline, k=len(baseline))), median(chance.choices(times, k=len(times))))
        for _ in range(resamples)
    ]
    low = sorted(0.0 if math.isnan(one) else one for one in drawn)
    high = sorted(math.inf if math.isnan(one) else one for one in drawn)
    tail = (1 - CONFIDENCE) / 2
    return Interval(_quantile(low, tail), speed_up(median(baseline), median(times)), _quantile(high, 1 - tail))


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which so large a part lies, between two of them in proportion (Hyndman and Fan's type 7)."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    if ordered[below] == ordered[above]:
        return ordered[below]
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


class Efficiency(msgspec.Struct, frozen=True):
    """What the time to a target is the product of (Mitliagkas et al. 2016)."""

    seconds_per_step: float
    """Hardware efficiency: a step is one minibatch of one replica."""
    steps: float
    """Statistical efficiency: steps of all replicas together, to the target."""

    @property
    def seconds(self) -> float:
        """The time to the target."""
        return self.seconds_per_step * self.steps


def efficiency(seconds: float, steps: float) -> Efficiency:
    """The two parts of the time to a target.

    >>> efficiency(6.0, 300).seconds_per_step, efficiency(MISSED, 300).seconds
    (0.02, inf)
    """
    return Efficiency(seconds / steps if steps else math.nan, steps)
