"""Order in which processors make writes visible: sums and crossings in shared memory rely on it."""

from __future__ import annotations

import platform

from distbelief.errors import UsageError


def in_order() -> bool:
    """Return whether processors of this machine make writes visible in order."""
    return platform.machine() in ("x86_64", "AMD64")


def check_order(what: str, remedy: str) -> None:
    """Raise a `UsageError` on a machine without this order, naming what needs it."""
    if not in_order():
        raise UsageError(
            f"{what} needs a processor that makes writes visible in their order, such as x86-64, and this is "
            f"{platform.machine()}; {remedy}"
        )
