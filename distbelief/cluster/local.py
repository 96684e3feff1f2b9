"""The local cluster: every role a process of this machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief import errors
from distbelief.core.settings import Settings
from distbelief.errors import UsageError, unknown
from distbelief.job import Job
from distbelief.strategy import Downpour

if TYPE_CHECKING:
    from distbelief.cluster.sitting import View

TRANSPORTS = ("shared", "tcp")


@dataclass(frozen=True)
class Local:
    """Processes of this machine."""

    transport: str = "shared"
    """How bytes travel: shared (memory) or tcp."""
    bind: str = "127.0.0.1"
    """With tcp, the host that coordinator and shards listen at."""
    insecure: bool = False
    """Allow plain TCP on a network other than loopback."""

    def run(self, job: Job, view: View | None = None) -> dict[str, Any]:
        """Run a job to its end; returns what `result.json` holds, and the run folder as `run`.

        Raises:
            DistbeliefError: the job could not begin, or failed; its processes are ended in any case.
        """
        began = time.monotonic()
        settings = self._settings(job)
        from distbelief.cluster.sitting import Sitting, View
        from distbelief.cluster.supervisor import Supervisor
        from distbelief.tasks import available, resolve

        if not job.reference:
            raise UsageError(
                "the task has no name by which other processes can make it: put its function in a module, and name it: 'module:function'"
            )
        if why := available(job.reference, job.data_dir):
            raise errors.DataError(why)
        sitting = Sitting(job, settings, view or View(), began)
        evaluates = settings.evaluate_every > 0 and resolve(job.reference, job.data_dir).test is not None
        return Supervisor(self, job, settings, sitting, evaluates).run()

    def launch(self, job: Job, script: list[str], view: View | None = None) -> dict[str, Any]:
        """Run a user's own script in every replica of a job; `job.task` is only a name there. Returns as `run` does.

        Args:
            job: how the shards train.
            script: the path of the script, and its arguments.
            view: how the job is shown.

        Raises:
            UsageError: there is no such script, or the strategy has no replicas.
            DistbeliefError: as `run`.
        """
        began = time.monotonic()
        settings = msgspec.structs.replace(self._settings(job), evaluate_every=0, target_accuracy=0.0)
        if not os.path.isfile(script[0]):
            raise UsageError(f"script {script[0]!r} is no file; name the Python script that every replica runs")
        if not isinstance(job.strategy, Downpour):
            raise UsageError(f"strategy {job.strategy.name} has no replicas to run a script in; run it with python itself")
        from distbelief.cluster.sitting import Sitting, View
        from distbelief.cluster.supervisor import Supervisor

        return Supervisor(self, job, settings, Sitting(job, settings, view or View(), began), False, script).run()

    def _settings(self, job: Job) -> Settings:
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        settings = job.settings()
        if settings.read_in_place and self.transport != "shared":
            raise UsageError("--read-in-place reads shared memory: it needs --transport shared")
        return settings
