"""Requirements of a job on processes of this machine: whatever cannot be run there is refused before anybody is
started.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from distbelief import errors
from distbelief.core import roles
from distbelief.core.settings import PRIVATE, SORTED, Check, Settings, among, option
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.paths import path_of
from distbelief.places.processes.addresses import PORTS, check_network, host_and_port, listen_at
from distbelief.places.processes.options import LocalOptions
from distbelief.places.processes.script import check_file
from distbelief.split.options import Split
from distbelief.strategies import check_findable

if TYPE_CHECKING:
    from distbelief.tasks import Task

TRANSPORTS = ("shared", "tcp")
PROCESSES = 4096
"""Most replicas and most shards on one machine, each of them a process."""
ROLES = 2
"""Processes of a job beside its replicas and shards: coordinator and evaluator."""
FILES, FILES_EACH = 30, 5
"""Open files of a process with torch imported and a run folder, and of those for each process of its job: a supervisor
has most of them.
"""
PIPE = 2
"""Those of a pipe."""
MANY = 16
"""More shards than this are held against the parameters of the model before any process is started; fewer, when the
first replica has made it.
"""


def checks(local: LocalOptions, job: Job, settings: Settings) -> Iterator[Check]:
    """Yield what refuses a strategy or option that has no meaning here, and more processes than a machine may have."""
    yield partial(among, "transport", local.transport, TRANSPORTS)
    yield partial(_check_addresses, local)
    yield partial(check_findable, job.strategy)
    yield partial(job.strategy.check_machine, settings, local)
    for name in ("replicas", "partitions", "shards"):
        yield partial(_check_number, name, getattr(settings, name))
    if local.compute:
        yield partial(local.compute.check, settings.replicas)
    yield partial(path_of, local.path, job.strategy, settings, local.carrier)
    if local.carrier == "tcp":
        yield partial(_check_ports, local, roles.shard(settings.shards - 1))


def _check_addresses(local: LocalOptions) -> None:
    """Refuse addresses where nobody listens.

    Raises:
        UsageError: naming the option.
    """
    given = [
        option(name)
        for name in ("bind", "advertise", "insecure", "tls")
        if getattr(local, name) != getattr(type(local), name)
    ]
    if local.listen and local.bind != type(local).bind:
        raise UsageError(f"--listen {local.listen} says where everybody listens: leave off --bind {local.bind}")
    if given and local.carrier != "tcp":
        raise UsageError(f"{given[0]} is of addresses, and shared memory has none: it needs --transport tcp")
    if local.tls and local.insecure:
        raise UsageError("--tls and --insecure exclude each other: leave one of them off")


def _check_number(name: str, count: int) -> None:
    if count > PROCESSES:
        raise UsageError(
            f"{option(name)} {count}: must be at most {PROCESSES} on one machine, each is a process; more can be "
            "simulated"
        )


def _check_ports(local: LocalOptions, last: str) -> None:
    """Refuse ports that there are not, by the option that named the first of them, and a network without TLS.

    Raises:
        UsageError: naming it.
    """
    where, first = ("--listen", local.listen) if local.listen else ("--bind", local.bind)
    _, port = host_and_port(first, where)
    if port > PORTS:
        raise UsageError(
            f"{where} {first}: port {port} is higher than any; choose one up to {PORTS}, or leave it off for any that "
            "is free"
        )
    listen_at(local.bound, last, f"{where} {first}")
    check_network(host_and_port(local.bound)[0], local.advertised)


def check_task(job: Job) -> None:
    """Refuse a task that no other process could make, or whose data are not there.

    Raises:
        UsageError: it has no name.
        DataError: it has no data.
    """
    from distbelief.tasks import available

    if not job.reference:
        raise UsageError(
            "the task has no name by which other processes can make it (one that was changed has lost its own): put a "
            "function that returns it"
            " in a module, and name that: 'module:function'"
        )
    if why := available(job.reference, job.data_dir):
        raise errors.DataError(why)


def check_script(job: Job, script: list[str]) -> None:
    """Refuse what means nothing to a job whose replicas run a script.

    Raises:
        UsageError: there is no such script, or the strategy or an option has no meaning for one.
    """
    for name in ("evaluate_every", "target_accuracy", "target_loss", "data_dir", "precision", "fixed_point"):
        if (value := getattr(job, name)) and value != getattr(Job, name):
            raise UsageError(
                f"{option(name)} {value}: is of a task, and a script reads and measures by itself: leave it off"
            )
    if job.data == SORTED:
        raise UsageError(
            f"--data {SORTED}: cuts by the labels of a task, and a script has its own: use --data {PRIVATE}"
        )
    if why := job.strategy.meaningless.get("script"):
        raise UsageError(f"a script means nothing to strategy {job.strategy.name}; {why}")
    check_file(script)


def check_split(settings: Settings, task: Task | None = None) -> None:
    """Refuse ways to split that there are not, also as the task's own.

    Raises:
        UsageError: naming the way, and the nearest.
    """
    if settings.partitions > 1:
        Split.parse(settings.split, settings.partitions, settings.chunks, task.split if task else None)


def check_model(task: Task, settings: Settings) -> None:
    """Refuse what the model of a task cannot be split into: over partitions, or over more shards than it has parameters
    (whether it can be over a few, its replicas find, and so do those of a script).

    Raises:
        UsageError: with the reason.
    """
    if settings.partitions > 1 or settings.shards > MANY:
        from distbelief.strategies import partition

        partition.check_model(task, settings)


def processes_of(settings: Settings) -> int:
    """Return how many processes a job has, at most, where they are all on one machine."""
    return len(roles.replicas(settings.mesh)) + settings.shards * (1 + settings.standby) + ROLES


def allow_files(settings: Settings, listens: bool) -> None:
    """Have this process and those that it starts open as many files as a job needs.

    Args:
        settings: of the job.
        listens: whether what each process prints goes through a pipe.

    Raises:
        UsageError: the machine forbids it.
    """
    needed = FILES + (FILES_EACH + PIPE * listens) * processes_of(settings)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (allowed, most) or needed <= allowed:
        return
    if needed > most:
        raise UsageError(
            f"this job needs some {needed} open files in one process, and this machine allows {most}: raise that "
            f"(ulimit -n {needed}), or have fewer"
            " --replicas or --shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
