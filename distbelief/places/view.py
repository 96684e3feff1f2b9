"""View of a job while it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from distbelief.core.values import CheckedStruct
from distbelief.record.sinks import SinkMaker, find

STAY = 60
"""Seconds after the end of a job until its page ends."""


class View(CheckedStruct, frozen=True):
    """View of a job while it runs."""

    quiet: bool = True
    json: bool = False
    title: str = ""
    """Description of the job, shown as it starts."""
    metrics: str = ""
    """PORT or HOST:PORT at which Prometheus reads the metrics of the job."""
    track: str = ""
    """Sink that follows the job: mlflow, mlflow:URI, wandb, aim, or one of another package."""
    page: int | bool = False
    """Serve a page of the job to browsers of this machine: at this port, or at any that is free."""

    def sinks(self) -> list[SinkMaker]:
        """Return the makers of what shows the job elsewhere.

        Raises:
            UsageError: as `find`.
        """
        makers = [find("prometheus", self.metrics, f"--metrics {self.metrics}")] if self.metrics else []
        if self.track:
            name, _, argument = self.track.partition(":")
            makers.append(find(name, argument, f"--track {self.track}"))
        return makers

    def show_start(self) -> None:
        """Print what begins, at once, since importing torch comes next and takes seconds.

        Raises:
            UsageError: as `sinks`.
        """
        self.sinks()
        if self.title and not (self.quiet or self.json):
            print(f"starting {self.title}", flush=True)

    def open_page(self, run: Path) -> None:
        """Start the page of a run, in a session of its own: Ctrl-C does not end it, and the job does not need it."""
        bind = f"127.0.0.1:{0 if self.page is True else self.page}"
        words = [sys.executable, "-m", "distbelief", "watch", str(run), "--bind", bind, "--stay", str(STAY)]
        # its address goes to standard error, since JSON may be on standard output
        opened = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)
        with contextlib.suppress(OSError):
            os.posix_spawn(sys.executable, words, os.environ, file_actions=opened, setsid=True)


UNSEEN = View()
