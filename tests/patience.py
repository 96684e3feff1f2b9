"""How long tests wait for what must happen, at most: so long on a quiet machine, times how much slower this one is."""

from time import monotonic

QUIET_SECONDS = 0.15
"""What `_calibrate` takes on a quiet machine."""


def _calibrate() -> float:
    began = monotonic()
    sum(number * number for number in range(1_500_000))
    return monotonic() - began


SLOWNESS = max(1.0, max(_calibrate() for _ in range(3)) / QUIET_SECONDS)
"""1 on a quiet machine; 4 where four programs want each core."""
SECONDS = 100.0 * SLOWNESS
"""Most that a test with processes waits for anything."""
