"""Options of a page."""

from __future__ import annotations

from dataclasses import dataclass


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
