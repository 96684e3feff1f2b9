"""Statistics of trials: medians in which a miss is infinite, and intervals of ratios; pure functions of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy

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
    return statistics.median(values) if values else math.nan


def ratio_of_medians(
    baseline: Sequence[float], times: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The speed-up, as the ratio of the medians, with its percentile bootstrap interval (Efron 1979).

    Each side's trials are drawn anew, with replacement. A draw in which neither side reached the target counts as 0
    for the lower bound, and as infinite for the upper.

    >>> ratio_of_medians([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    Interval(low=2.0, ratio=2.0, high=2.0)
    """
    if not baseline or not times:
        return Interval(math.nan, math.nan, math.nan)
    chance = numpy.random.default_rng(seed)
    ours, theirs = (numpy.median(chance.choice(side, (resamples, len(side))), axis=1) for side in (times, baseline))
    with numpy.errstate(invalid="ignore"):
        drawn, ratio = theirs / ours, numpy.divide(median(baseline), median(times))
    tail = (1 - CONFIDENCE) / 2
    # no value between two draws: that of a finite one and an infinite one is none
    low = numpy.quantile(numpy.where(numpy.isnan(drawn), 0.0, drawn), tail, method="lower")
    high = numpy.quantile(numpy.where(numpy.isnan(drawn), math.inf, drawn), 1 - tail, method="higher")
    return Interval(float(low), float(ratio), float(high))
