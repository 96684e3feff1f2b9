"""The command `watch`: the page of a run, in a process of its own that may be killed at any moment."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from distbelief.cli.arguments import ask_maybe
from distbelief.errors import UsageError

PROG = "distbelief watch [RUN]"


@dataclass(frozen=True)
class WatchOptions:
    """Serve a page that shows a run in a browser: a running job, an ended one, or a simulated one."""

    bind: str = "127.0.0.1"
    """HOST or HOST:PORT of the page; without a port, one that is free. On any network but loopback it is served by TLS,
    with a certificate of the authority in the run folder."""
    control: bool = False
    """Add buttons that stop the job with a checkpoint, or kill a replica; only for a job of yours on this machine."""
    proxy: str = ""
    """Host of a proxy by which browsers reach the page, such as hub.example.org."""
    stay: float | None = None
    """Seconds after the end of the job until the page ends too; without it, the page ends by Ctrl-C."""


def watch(args: list[str]) -> int:
    """Run `distbelief watch [RUN] [options]`."""
    named, settings = ask_maybe(PROG, WatchOptions, args)
    need_packages()
    from distbelief.lab.watch import serving
    from distbelief.lab.watch.control import press
    from distbelief.lab.watch.reading import Reading, newest
    from distbelief.places.status import supervisor

    run = Path(named) if named else newest(Path("runs"))
    if run is None:
        raise UsageError(f"there is no run under runs/: name its folder, {PROG}")
    reader = Reading(run)
    if settings.control:
        supervisor(run)  # which there must be
    button = partial(press, run) if settings.control else None
    serving.serve(run, reader, settings.bind, button, settings.proxy, settings.stay)
    return 0


def need_packages() -> None:
    """Refuse a page whose packages are missing."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UsageError(f"the page needs {' and '.join(missing)}: pip install 'distbelief[page]'")


def check_page(page: int | bool) -> None:
    """Refuse a page that could not be served at this port, or at any if it is True."""
    need_packages()
    try:
        socket.create_server(("127.0.0.1", 0 if page is True else page)).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"--page {page}: cannot be used ({error}); name another port, or leave it off") from error
