"""The line search: a generator that yields a step to try, and is sent the loss there and the slope along the direction.

It returns the step that it accepts, which is always the last that it tried, or None if no step lowers the loss enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

SUFFICIENT, CURVATURE = 1e-4, 0.9
"""c1 and c2 of the Wolfe conditions."""
TRIALS = 25
"""Most steps that a search tries."""
NARROW = 1e-9
"""Least length of a bracket, times the largest component of the direction."""


class SearchPoint(NamedTuple):
    """A step, with the loss and the slope there."""

    step: float
    loss: float
    slope: float


class SearchStart(NamedTuple):
    """Start of a search: loss and slope at step 0, the first step, the direction's largest component, and c2."""

    loss: float
    slope: float
    first: float
    largest: float = 1.0
    curvature: float = CURVATURE


Search = Generator[float, tuple[float, float], SearchPoint | None]


def _try(step: float) -> Generator[float, tuple[float, float], SearchPoint]:
    loss, slope = yield step
    # a loss that is not finite counts as infinite, so that the search goes back to smaller steps
    return SearchPoint(step, loss if math.isfinite(loss) else math.inf, slope)


def cubic(a: SearchPoint, b: SearchPoint, least: float, most: float) -> float:
    """Return the minimum of the cubic through two trials, or the middle of the bounds (Nocedal and Wright, 3.59).

    >>> cubic(SearchPoint(0.0, 1.0, -2.0), SearchPoint(3.0, 4.0, 4.0), 0.0, 3.0)
    1.0
    """
    if a.step > b.step:
        a, b = b, a
    if not all(map(math.isfinite, (*a, *b))):
        return (least + most) / 2
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if square < 0:
        return (least + most) / 2
    d2 = math.sqrt(square)
    below = b.slope - a.slope + 2 * d2
    if not below:
        return (least + most) / 2
    return min(max(b.step - (b.step - a.step) * ((b.slope + d2 - d1) / below), least), most)


def wolfe(start: SearchStart) -> Search:
    """Find a step that satisfies the strong Wolfe conditions: bracket, then zoom (Nocedal and Wright, 3.5 and 3.6).

    When trials run out or the bracket is too narrow, accept the best step that lowers the loss enough.

    >>> search = wolfe(SearchStart(loss=1.0, slope=-2.0, first=3.0)); next(search)
    3.0
    >>> search.send(((1 - 3.0) ** 2, 2 * (3.0 - 1)))
    1.0
    """
    zero = SearchPoint(0.0, start.loss, start.slope)
    before, here, tried = zero, (yield from _try(start.first)), 1
    bracket: list[SearchPoint] = []

    def enough(trial: SearchPoint) -> bool:
        return trial.loss <= start.loss + SUFFICIENT * trial.step * start.slope

    def flat(trial: SearchPoint) -> bool:
        return abs(trial.slope) <= -start.curvature * start.slope

    while not bracket:
        if not enough(here) or (tried > 2 and here.loss >= before.loss):
            bracket = [before, here]
        elif flat(here):
            return here
        elif here.slope >= 0:
            bracket = [before, here]
        elif tried >= TRIALS:
            return here
        else:
            least, most = here.step + 0.01 * (here.step - before.step), here.step * 10
            before, here = here, (yield from _try(cubic(before, here, least, most)))
            tried += 1
    return (yield from _zoom(zero, bracket, tried, start, enough, flat))


def _zoom(
    zero: SearchPoint,
    bracket: list[SearchPoint],
    tried: int,
    start: SearchStart,
    enough: Callable[[SearchPoint], bool],
    flat: Callable[[SearchPoint], bool],
) -> Search:
    """Narrow a bracket that contains such a step."""
    low, high = sorted(bracket, key=lambda trial: trial.loss)
    last, slow = bracket[-1], False
    while tried < TRIALS and abs(high.step - low.step) * start.largest >= NARROW:
        left, right = sorted((low.step, high.step))
        step, margin = cubic(low, high, left, right), 0.1 * (right - left)
        near = min(right - step, step - left) < margin
        if near and (slow or step in (left, right)):
            step = right - margin if right - step < step - left else left + margin
            near = False
        slow = near
        last = trial = yield from _try(step)
        tried += 1
        if not enough(trial) or trial.loss >= low.loss:
            high = trial
            if high.loss < low.loss:
                low, high = high, low
        elif flat(trial):
            return trial
        else:
            if trial.slope * (high.step - low.step) >= 0:
                high = low
            low = trial
    if not (low.step and enough(low) and low.loss < zero.loss):
        return None
    return low if last.step == low.step else (yield from _try(low.step))
