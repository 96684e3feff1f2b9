"""The local cluster: every role a process of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.core.settings import Check, Holder, Settings
from distbelief.job import Job, refusals, refuse
from distbelief.places import signals
from distbelief.places.paths import path_of
from distbelief.places.processes import forkserver, requirements
from distbelief.places.processes.options import LocalOptions
from distbelief.places.processes.processes import Hooks, Processes
from distbelief.places.view import View

if TYPE_CHECKING:
    from distbelief.places.attempt import Attempt
    from distbelief.places.cluster.host_processes import HostProcesses


@dataclass(frozen=True)
class Local(LocalOptions):
    """Processes of this machine."""

    def checks(self, job: Job, settings: Settings) -> Iterator[Check]:
        """Yield what refuses a job here."""
        return requirements.checks(self, job, settings)

    def settings(self, job: Job) -> Settings:
        """Return what every role of a job is told here.

        Raises:
            UsageError: an option cannot be, or has no meaning here.
        """
        refuse(refusals(job, self))
        return job.unchecked

    def run(self, job: Job, view: View | None = None) -> Json:
        """Run a job to its end; returns what `result.json` holds, and the run folder as `run`.

        Raises:
            DistbeliefError: the job could not begin, or failed; its processes are ended in any case.
        """
        began = time.monotonic()
        settings = self.settings(job)
        if isinstance(view, View):
            view.show_start()
        self._begin(job, settings, self.logs)
        requirements.check_task(job)
        from distbelief.places.attempt import evaluates
        from distbelief.tasks import resolve

        task = resolve(job.reference, job.data_dir)
        evaluated = evaluates(settings, task)
        requirements.check_split(settings, task)
        requirements.check_model(task, settings)
        return self._run(job, settings, view, began, evaluated)

    def launch(self, job: Job, script: list[str], view: View | None = None) -> Json:
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
        settings = self.settings(job).unmeasured()
        requirements.check_script(job, script)
        if isinstance(view, View):
            view.show_start()
        self._begin(job, settings, listens=True)
        requirements.check_split(settings)
        return self._run(job, settings, view, began, evaluated=False, script=script)

    def _begin(self, job: Job, settings: Settings, listens: bool) -> None:
        """Refuse a machine that cannot have the processes of a job, and begin to start them."""
        requirements.allow_files(settings, listens)
        forkserver.start(settings.partitions > 1, self._tasks(job, settings))

    def _tasks(self, job: Job, settings: Settings) -> int:
        """Processes and threads of a job that this machine has: of each, its own threads and the one that watches."""
        return (job.threads + 1) * requirements.processes_of(settings)

    def _run(
        self,
        job: Job,
        settings: Settings,
        view: View | None,
        began: float,
        evaluated: bool,
        script: list[str] | None = None,
    ) -> Json:
        from distbelief.places.attempt import Attempt
        from distbelief.places.processes.running import Running

        with signals.waitable() as woken:
            attempt = Attempt(job, settings, view, began, more=self._kept(job, settings))
            make = self.make_processes(job, settings, evaluated, attempt)
            return Running(self, attempt, evaluated, script, make).run(woken)

    def _kept(self, job: Job, settings: Settings) -> Json:
        """Return what `job.json` keeps of this place."""
        kept: Json = {}
        if job.strategy.held_by is Holder.SHARDS:
            kept["path"] = path_of(self.path, job.strategy, settings, self.carrier)
        if roles.SINGLE not in job.strategy.roles(measured=False):
            kept["carrier"] = self.told_carrier
        return kept

    def make_processes(
        self, job: Job, settings: Settings, evaluated: bool, attempt: Attempt
    ) -> Callable[[Hooks], Processes | HostProcesses]:
        """Return what makes the place of a job's processes."""
        return Processes.of
