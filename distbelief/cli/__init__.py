"""The command line: arguments to calls; it decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


def teller(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line at once, or nothing where that is asked for."""
    return (lambda _: None) if quiet else partial(print, flush=True)
