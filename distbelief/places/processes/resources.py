"""Cores, memory and disk that a job has on this machine, as it records them while it runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from distbelief.core import records, roles
from distbelief.places.attempt import Attempt
from distbelief.places.cluster.remote_agent import RemoteLife
from distbelief.places.processes.processes import Child
from distbelief.record import limits

PERIOD = 30.0
"""Seconds between two records of the resources, unless these shrink."""
SHRUNK = 0.8
"""Ratio of free memory or disk to that of the last record, below which there is another at once."""


@dataclass
class ResourcesMeter:
    """Meter of the resources of a job."""

    attempt: Attempt
    last: records.Resources | None = None
    moment: float = 0.0

    def look(self, now: float, lives: Iterable[Child | RemoteLife]) -> None:
        """Record the resources if they have shrunk or the last record is old; lives on other hosts do not count."""
        free, whole = limits.memory()
        free_disk = disk = 0
        if self.attempt.folder:
            with contextlib.suppress(OSError):  # the folder may be gone
                disk, _, free_disk = shutil.disk_usage(self.attempt.folder.path)
        last = self.last
        lasts = last and free >= SHRUNK * last.free_memory and free_disk >= SHRUNK * last.free_disk
        if lasts and now < self.moment + PERIOD:
            return
        here = [life.role for life in lives if isinstance(life, Child)]
        computing = sum(role == roles.SINGLE or roles.is_replica(role) for role in here)
        threads = computing * self.attempt.job.threads
        self.last, self.moment = records.Resources(limits.cores(), threads, free, whole, free_disk, disk), now
        self.attempt.record(now, roles.SUPERVISOR, self.last)
