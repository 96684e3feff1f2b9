"""Rooms that read results and start jobs, and are never part of one."""

import math


def number(value: float) -> str:
    """Return a number with three significant digits; "-" for a miss.

    >>> number(0.01234), number(1234.5), number(math.inf)
    ('0.0123', '1,234', '-')
    """
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
