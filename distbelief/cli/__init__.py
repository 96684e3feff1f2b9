"""The command line: turns arguments into calls."""

import threading
from collections.abc import Callable

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""
ENDED = threading.Event()
"""Set once a command's job has ended: a Ctrl-C may still come."""


def teller(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line at once, or nothing if `quiet`."""
    return (lambda _: None) if quiet else lambda text: print(text, flush=True)
