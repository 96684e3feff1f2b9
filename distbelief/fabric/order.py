"""The order in which processors let others see what they write: sums and crossings in shared memory rely on it."""

from __future__ import annotations

import platform

from distbelief.errors import UsageError


def in_order() -> bool:
    """Return whether others see what a processor of this machine writes in the order in which it writes."""
    return platform.machine() in ("x86_64", "AMD64")


def check_order(what: str, remedy: str) -> None:
    """Refuse what relies on that order, on a machine that does not keep it.

    Raises:
        UsageError: naming the machine.
    """
    if not in_order():
        raise UsageError(
            f"{what} lies in memory that others must see written in order: that needs an x86-64 processor, and this is "
            f"{platform.machine()}; {remedy}"
        )
