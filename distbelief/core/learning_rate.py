"""Learning-rate schedules: the factor on the base rate as a function of the samples applied at the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from distbelief.errors import UsageError, unknown

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "step": lambda progress: 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01,
}
"""Each takes the progress of the job, 0 to 1. `step` divides by ten at a half and at three quarters."""


def check(name: str) -> None:
    """Refuse an unknown schedule.

    Raises:
        UsageError: with the nearest known name.
    """
    if name not in SCHEDULES:
        raise unknown("learning-rate schedule", name, SCHEDULES)


def factor(name: str, samples: int, total: int) -> float:
    """The factor after `samples` of `total` samples have been applied.

    >>> factor("linear", 25, 100)
    0.75
    """
    if total < 1:
        raise UsageError(f"a schedule needs the samples of the whole job, got {total}")
    return SCHEDULES[name](min(1.0, samples / total))
