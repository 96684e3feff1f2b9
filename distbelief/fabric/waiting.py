"""The wait for what others do in shared memory: one looks, and gives the core away between two looks."""

from __future__ import annotations

import os
from time import perf_counter, sleep

SPIN_SECONDS = 200e-6
"""Time of looking again at once, before one sleeps between two looks."""
NAP_SECONDS, NAPS_SECONDS = 50e-6, 1e-3
"""The shortest sleep, and the longest."""
NAP_SHARE = 1 / 16
"""Share of the time waited so far for which one sleeps."""


def rest(waited: float) -> None:
    """Give the core away between two looks at what one has waited for so many seconds."""
    if waited < SPIN_SECONDS:
        os.sched_yield()
    else:
        sleep(min(max(waited * NAP_SHARE, NAP_SECONDS), NAPS_SECONDS))


class Wait:
    """A wait that lasts until something is got on with."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began: float | None = None

    def end(self) -> None:
        """Something was got on with."""
        self._began = None

    def rest(self) -> bool:
        """Give the core away; whether one has waited so long that there is time for something else."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        waited = now - self._began
        rest(waited)
        return waited >= SPIN_SECONDS
