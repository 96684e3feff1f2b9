"""Local cluster: every role is a process of this machine; and the checks before any process is started."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.core.settings import PRIVATE, SORTED, Check, Holder, Settings, among, option
from distbelief.errors import DataError, UsageError
from distbelief.job import Job, refusals, refuse
from distbelief.places import signals
from distbelief.places.processes import forkserver
from distbelief.places.processes.options import PORTS, LocalOptions, check_network, host_and_port, listen_at
from distbelief.places.processes.processes import Hooks, Processes
from distbelief.places.processes.script import check_file
from distbelief.places.view import View
from distbelief.split.options import Split
from distbelief.strategies import check_findable
from distbelief.strategies.base import DIRECT, is_alone, path_of

if TYPE_CHECKING:
    from distbelief.places.attempt import Attempt
    from distbelief.places.cluster.host_processes import HostProcesses
    from distbelief.tasks import Task

TRANSPORTS = ("shared", "tcp")
PROCESSES = 4096
"""Most replicas, and most shards, on one machine: each of them is a process."""
ROLES = 2
"""Processes of a job besides its replicas and shards: the coordinator and the evaluator."""
FILES, FILES_EACH = 30, 5
"""Open files of a supervisor, and those that it adds for each process of the job.

The supervisor has torch imported and a run folder, and has the most open files of all processes.
"""
PIPE = 2
"""Open files of a pipe."""
MANY = 16
"""Most shards that are not compared with the model before the processes start: the first replica checks them."""


@dataclass(frozen=True)
class Local(LocalOptions):
    """Processes of this machine."""

    def checks(self, job: Job, settings: Settings) -> Iterator[Check]:
        """Yield checks that refuse options without a meaning here, and more processes than a machine may have."""
        yield partial(among, "transport", self.transport, TRANSPORTS)
        yield self._check_addresses
        yield partial(check_findable, job.strategy)
        yield partial(job.strategy.check_machine, settings, self)
        for name in ("replicas", "partitions", "shards"):
            yield partial(_check_number, name, getattr(settings, name))
        if self.compute:
            yield partial(self.compute.check, settings.replicas)
        yield partial(path_of, self.path, job.strategy, settings, self.carrier)
        if self.carrier == "tcp":
            yield partial(self._check_ports, roles.shard(settings.shards - 1))

    def _check_addresses(self) -> None:
        """Refuse options for addresses at which no role would listen."""
        given = [
            option(name)
            for name in ("bind", "advertise", "insecure", "tls")
            if getattr(self, name) != getattr(type(self), name)
        ]
        if self.listen and self.bind != type(self).bind:
            raise UsageError(f"--listen {self.listen} says where everybody listens: leave off --bind {self.bind}")
        if given and self.carrier != "tcp":
            raise UsageError(f"{given[0]} needs --transport tcp: shared memory has no addresses")
        if self.tls and self.insecure:
            raise UsageError("--tls and --insecure exclude each other: leave one of them off")

    def _check_ports(self, last: str) -> None:
        """Refuse ports that do not exist, and a machine that cannot reach itself."""
        where, first = ("--listen", self.listen) if self.listen else ("--bind", self.bind)
        _, port = host_and_port(first, where)
        if port > PORTS:
            raise UsageError(
                f"{where} {first}: port {port} is too high; choose one up to {PORTS}, or leave it off for any "
                "that is free"
            )
        listen_at(self.bound, last, f"{where} {first}")
        check_network(host_and_port(self.bound)[0], self.advertised)

    def settings(self, job: Job) -> Settings:
        """Return the settings that every role of a job gets here.

        Raises:
            UsageError: an option has an impossible value, or no meaning here.
        """
        refuse(refusals(job, self))
        return job.unchecked

    def run(self, job: Job, view: View | None = None) -> Json:
        """Run a job to its end; return the content of `result.json`, with the run folder as `run`.

        Raises:
            DistbeliefError: the job could not begin, or failed; its processes are ended in any case.
        """
        began = time.monotonic()
        settings = self.settings(job)
        if isinstance(view, View):
            view.show_start()
        self._begin(job, settings, self.logs)
        check_task(job)
        from distbelief.places.attempt import evaluates
        from distbelief.tasks import resolve

        task = resolve(job.reference, job.data_dir)
        evaluated = evaluates(settings, task)
        check_split(settings, task)
        check_model(task, settings)
        return self._run(job, settings, view, began, evaluated)

    def launch(self, job: Job, script: list[str], view: View | None = None) -> Json:
        """Run a user's own script in every replica of a job; return as `run` does.

        Args:
            job: options of the training; its `task` is only a name here.
            script: the path of the script, and its arguments.
            view: display of the job.

        Raises:
            UsageError: there is no such script, or the strategy has no replicas.
            DistbeliefError: as `run`.
        """
        began = time.monotonic()
        settings = self.settings(job).unmeasured()
        check_script(job, script)
        if isinstance(view, View):
            view.show_start()
        self._begin(job, settings, listens=True)
        check_split(settings)
        return self._run(job, settings, view, began, evaluated=False, script=script)

    def _begin(self, job: Job, settings: Settings, listens: bool) -> None:
        """Refuse a machine that cannot run the processes of a job; start the forkserver."""
        allow_files(settings, listens)
        forkserver.start(settings.partitions > 1, self._tasks(job, settings))

    def _tasks(self, job: Job, settings: Settings) -> int:
        """Return the number of a job's threads here: torch's in each process, and one that watches."""
        return (job.threads + 1) * processes_of(settings)

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
            return Running(self, attempt, evaluated, script, self.make_processes(attempt, evaluated)).run(woken)

    def _kept(self, job: Job, settings: Settings) -> Json:
        """Return the entries of `job.json` about this place."""
        kept: Json = {}
        if job.strategy.held_by is Holder.SHARDS:
            # without updates by shards' processes there is only one path
            only = "path" in job.strategy.meaningless and job.strategy.needs_memory(settings, self.carrier)
            kept["path"] = DIRECT if only else path_of(self.path, job.strategy, settings, self.carrier)
        if not is_alone(job.strategy):
            kept["carrier"] = "tls" if self.encrypted else self.carrier
        if self.compute:
            kept["compute"] = msgspec.to_builtins(self.compute, str_keys=True)
        return kept

    def make_processes(self, attempt: Attempt, evaluated: bool) -> Callable[[Hooks], Processes | HostProcesses]:
        """Return the factory of the place in which a job's processes run."""
        return Processes.of


def _check_number(name: str, count: int) -> None:
    if count > PROCESSES:
        raise UsageError(
            f"{option(name)} {count}: must be at most {PROCESSES} on one machine, each is a process; more can be "
            "simulated"
        )


def check_task(job: Job) -> None:
    """Refuse a task that other processes could not build, or whose data are missing.

    A task without a name raises a `UsageError`. Missing data raise a `DataError`.
    """
    from distbelief.tasks import available

    if not job.reference:
        raise UsageError(
            "the task has no name by which other processes can make it (one that was changed has lost its own): put a "
            "function that returns it in a module, and name that: 'module:function'"
        )
    if why := available(job.reference, job.data_dir):
        raise DataError(why)


def check_script(job: Job, script: list[str]) -> None:
    """Refuse a missing script, and a strategy and options without a meaning for a script."""
    for name in ("evaluate_every", "target_accuracy", "target_loss", "data_dir", "precision", "fixed_point"):
        if (value := getattr(job, name)) and value != getattr(Job, name):
            raise UsageError(
                f"{option(name)} {value}: is for a task; a script loads and measures its own data: leave it off"
            )
    if job.data == SORTED:
        raise UsageError(f"--data {SORTED}: cuts by the labels of a task; a script has its own: use --data {PRIVATE}")
    if why := job.strategy.meaningless.get("script"):
        raise UsageError(f"a script means nothing to strategy {job.strategy.name}; {why}")
    check_file(script)


def check_split(settings: Settings, task: Task | None = None) -> None:
    """Refuse unknown ways to split a model, those of the task included, and name the most similar one."""
    if settings.partitions > 1:
        Split.parse(settings.split, settings.partitions, settings.chunks, task.split if task else None)


def check_model(task: Task, settings: Settings) -> None:
    """Refuse partitions over which the model of a task cannot be split, and more shards than it has parameters.

    A few shards are not checked here, nor the model of a script: the replicas check them.
    """
    if settings.partitions > 1 or settings.shards > MANY:
        from distbelief.strategies import partition

        partition.check_model(task, settings)


def processes_of(settings: Settings) -> int:
    """Return the largest number of processes that a job has if all are on one machine."""
    return len(roles.replicas(settings.mesh)) + settings.shards * (1 + settings.standby) + ROLES


def allow_files(settings: Settings, listens: bool) -> None:
    """Raise the limit of open files to what a job needs, for this process and those that it starts.

    `listens` is true if the output of each process goes through a pipe. A machine that forbids the limit is refused.
    """
    needed = FILES + (FILES_EACH + PIPE * listens) * processes_of(settings)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (allowed, most) or needed <= allowed:
        return
    if needed > most:
        raise UsageError(
            f"this job needs some {needed} open files in one process, and this machine allows {most}: raise that "
            f"(ulimit -n {needed}), or have fewer --replicas or --shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
