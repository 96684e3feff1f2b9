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

BACKOFF = "backoff"
"""`backoff:0.9` multiplies by 0.9 after each epoch (Niu et al. 2011); without a number, by that."""
FACTOR = 0.9


def check(name: str) -> None:
    """Refuse an unknown schedule.

    Raises:
        UsageError: with the nearest known name.
    """
    if name.partition(":")[0] == BACKOFF:
        _beta(name)
    elif name not in SCHEDULES:
        raise unknown("learning-rate schedule", name, [*SCHEDULES, BACKOFF])


def _beta(name: str) -> float:
    """What `backoff` multiplies by after each epoch."""
    _, colon, number = name.partition(":")
    try:
        beta = float(number) if colon else FACTOR
    except ValueError:
        beta = 0.0
    if not 0 < beta <= 1:
        raise UsageError(f"--lr-schedule {name}: multiplies by a number from 0 to 1 after each epoch; write backoff:0.9")
    return beta


def factor(name: str, samples: int, total: int, epochs: int = 1) -> float:
    """The factor after `samples` of the `total` samples of so many epochs have been applied.

    >>> factor("linear", 25, 100), factor("backoff:0.5", 59, 100, epochs=5)
    (0.75, 0.25)
    """
    if total < 1:
        raise UsageError(f"a schedule needs the samples of the whole job, got {total}")
    if name.startswith(BACKOFF):
        return _beta(name) ** (min(samples, total - 1) * epochs // total)
    return SCHEDULES[name](min(1.0, samples / total))
