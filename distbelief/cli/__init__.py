"""The command line: arguments to calls; it decides nothing."""

from collections.abc import Callable

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


def teller(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line at once; with `quiet`, what prints none."""
    return (lambda _: None) if quiet else lambda text: print(text, flush=True)
