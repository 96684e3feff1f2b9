"""The cluster: a place that runs each role as a process of one of several hosts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbelief.core import roles
from distbelief.core.records import Json, Outcome
from distbelief.core.settings import Check, Settings, option
from distbelief.errors import Interrupted, UsageError, unknown
from distbelief.job import Job
from distbelief.places import signals
from distbelief.places.cluster import launched, meeting
from distbelief.places.cluster.checking import HostReport, check_hosts
from distbelief.places.cluster.engines import Engine, RemoteShell, passed_on
from distbelief.places.cluster.host_processes import HostProcesses
from distbelief.places.cluster.hosts import Host, parse_hostfile, parse_hosts
from distbelief.places.cluster.opening import Opened, open_hosts
from distbelief.places.cluster.order import OrderedHosts, lines, order
from distbelief.places.cluster.placement import HostSlots, Placement
from distbelief.places.cluster.ray_cluster import address_of
from distbelief.places.cluster.slurm import SlurmSteps, allocated_hosts, is_allocated, show_topology
from distbelief.places.messages import OpenJob
from distbelief.places.place import check_leave_within
from distbelief.places.processes.local import Local
from distbelief.places.processes.processes import Hooks

if TYPE_CHECKING:
    from distbelief.places.attempt import Attempt
    from distbelief.places.view import View


@dataclass(frozen=True)
class Cluster(Local):
    """Place for processes of several hosts, which a remote shell starts: `Cluster(hosts="a:4,b:4")`."""

    hosts: str = ""
    """Hosts to train on, each with its number of slots (a:4,b:4). A slot holds one replica, or one partition of a split
    replica. Without a number, a host has one slot for each core, or with --device cuda for each GPU. Hosts are logged
    in to by SSH.
    """
    hostfile: str = ""
    """A file that names the hosts instead, one a line: `a slots=4`, or `a:4`."""
    remote_shell: str = "ssh"
    """The command, with its options, that logs in to a host; it must not ask for a password."""
    on: str = ""
    """Engine that starts a job on its hosts. ssh: by SSH. slurm: inside an allocation of several nodes, which are the
    hosts; it is used by default there. ray, or ray:HOST:PORT: on the nodes of a running Ray cluster.
    """
    topology: str = ""
    """A file that describes the switches between the hosts, in the format of Slurm's topology.conf. Replicas are
    ordered along a walk over the switches, so that a ring takes each link once; shards and standbys are spread over the
    switches. Without a file, inside Slurm, the topology is Slurm's own.
    """
    interface: str = ""
    """The network interface by whose address hosts are reached, such as eth1. Without it, each is tried until one
    answers.
    """
    tickets: str = ""
    """Folder, shared by all hosts, in which the processes started by srun, torchrun or mpirun find each other. It is
    the working directory by default.
    """
    oversubscribe: bool = False
    """Let a host have more replicas than slots."""
    leave_within: float = 0.0
    """Seconds within which a host leaves once its agent gets SIGTERM: its replicas finish what they have begun and
    leave, and the others go on. Without it, the whole job ends then.
    """

    @property
    def named(self) -> tuple[Host, ...]:
        """Hosts of the job, in their order; it raises as `ordered`."""
        return self.ordered.hosts

    @cached_property  # cached, since it reads a file or asks Slurm
    def ordered(self) -> OrderedHosts:
        """Hosts in the order of the topology, or as they are written if there is none.

        Raises:
            UsageError: no hosts are written, or both options name them, or they are malformed; or the topology cannot
                be used.
        """
        in_slurm = self.engine == "slurm" or (self.engine == LAUNCHED and "SLURM_JOB_ID" in os.environ)
        return order(self._written, self.topology, show_topology() if in_slurm and not self.topology else "")

    @property
    def _written(self) -> tuple[Host, ...]:
        named = f"--hosts {self.hosts}" if self.hosts else f"--hostfile {self.hostfile}" * bool(self.hostfile)
        if self.engine == RAY and named:
            raise UsageError(f"{named}: with --on {self.on} the hosts are the nodes of the cluster; leave one off")
        if self.engine in MET:
            return self._meeting().hosts
        if self.engine == "slurm":
            if named:
                raise UsageError(
                    f"{named}: inside Slurm the hosts are the nodes of the allocation; "
                    "leave it off, or log in to others with --on ssh"
                )
            return allocated_hosts(os.environ)
        if self.hosts and self.hostfile:
            raise UsageError(f"--hosts {self.hosts} and --hostfile {self.hostfile} both name the hosts: leave one off")
        if self.hosts:
            return parse_hosts(self.hosts)
        if not self.hostfile:
            raise UsageError("which hosts? Name them with --hosts a:4,b:4, or in a --hostfile")
        try:
            return parse_hostfile(Path(self.hostfile).read_text("utf-8-sig"), self.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--hostfile {self.hostfile} cannot be read: {error}") from error

    @property
    def engine(self) -> str:
        """Name of the engine that starts agents.

        It is a launcher if one has started this command several times, else the engine of `on`. By default it is Slurm
        inside an allocation of several nodes, and SSH elsewhere.

        Raises:
            UsageError: there is no such engine, or a launcher has named the hosts already.
        """
        address = address_of(self.on)
        if self.on not in ENGINES and address is None:
            raise unknown("engine", self.on, ENGINES[1:])
        if (start := launched.own()) is not None:
            for name in ("hosts", "hostfile", "on", "remote_shell"):
                if getattr(self, name) != getattr(Cluster, name):
                    raise UsageError(
                        f"{option(name)} {getattr(self, name)}: {start.launcher} has started this command "
                        f"{start.size} times, on the hosts of the job; leave it off, or start it once, without "
                        f"{start.launcher}"
                    )
            return LAUNCHED
        if self.tickets:
            raise UsageError(
                f"--tickets {self.tickets}: is for a command that srun, torchrun or mpirun has started several times; "
                "leave it off"
            )
        if address is not None:
            return RAY
        return self.on or ("slurm" if is_allocated(os.environ) else "ssh")

    @property
    def slots(self) -> int:
        """Number of slots of all hosts; 0 if some host's slots are not written."""
        counts = [host.slots for host in self.named]
        return 0 if 0 in counts else sum(counts)

    @property
    def carrier(self) -> str:
        return "tcp"

    @property
    def encrypted(self) -> bool:
        return not self.insecure

    def attend(self) -> None:
        """Keep all processes of a launcher but the first here until the job is over.

        Raises:
            SystemExit: the job is over; the exception has its status.
        """
        start = launched.own()
        if self.engine == LAUNCHED and start and start.rank:
            raise SystemExit(meeting.attend(start, self.tickets))

    @property
    def _start(self) -> launched.Launched:
        """Position of this process among a launcher's."""
        start = launched.own()
        assert start
        return start

    def _meeting(self) -> meeting.Meeting:
        if (address := address_of(self.on)) is not None:
            return meeting.meet_by_ray(address, self.interface)
        return meeting.meet(self._start, self.tickets, self.interface)

    def settings(self, job: Job) -> Settings:
        """Return the settings of a job for every role; only the first of a launcher's processes goes on."""
        self.attend()
        return super().settings(job)

    def checks(self, job: Job, settings: Settings) -> Iterator[Check]:
        """Yield the checks of a job: those of `Local`, and checks that hosts are well written and have enough slots."""
        yield partial(check_leave_within, self.leave_within, "have the whole job end when a host is told to go")
        for name, instead in ELSEWHERE.items():
            yield partial(self._check_one_host, name, instead)
        yield partial(self._check_memory, job, settings)
        yield from super().checks(job, settings)
        yield partial(self._check_slots, job, settings)

    def _check_slots(self, job: Job, settings: Settings) -> None:
        if self.slots:
            self.plan(settings, job.strategy.roles(measured=True))

    def _check_one_host(self, name: str, instead: str) -> None:
        if getattr(self, name) != getattr(Local, name):
            raise UsageError(f"{option(name)} {getattr(self, name)}: is for one host, but there are several; {instead}")

    def _check_memory(self, job: Job, settings: Settings) -> None:
        if job.strategy.needs_memory(settings, self.carrier):
            raise UsageError(
                f"strategy {job.strategy.name} is for replicas that share one memory, but hosts have each their own: "
                "use another, such as downpour"
            )

    def plan(self, settings: Settings, everybody: Sequence[str]) -> Placement:
        """Return the placement by the slots that are written, as if all hosts saw the run folder; no host is asked.

        Raises:
            UsageError: slots are not written, or there are too few.
        """
        if not self.slots:
            bare = next(host.name for host in self.named if not host.slots)
            raise UsageError(f"how many slots has host {bare}? Hosts are not asked here: write the number, {bare}:4")
        ordered = self.ordered
        sites = [HostSlots(host.name, host.slots, True, ordered.switch_of(at)) for at, host in enumerate(ordered.hosts)]
        return self._place(settings, everybody, sites)

    def preview(self, settings: Settings, everybody: Sequence[str]) -> list[str]:
        """Return lines that show the placement, and the traffic of the links between hosts."""
        placement = self.plan(settings, everybody)
        return [*placement.lines(), *lines(self.ordered, settings, placement.where)]

    def _place(self, settings: Settings, everybody: Sequence[str], sites: Sequence[HostSlots]) -> Placement:
        servers = [role for role in everybody if roles.kind(role) in (roles.Kind.SHARD, roles.Kind.STANDBY)]
        alone = [role for role in everybody if role not in servers and not roles.is_replica(role)]
        return Placement(sites, settings.mesh, servers, alone, oversubscribe=self.oversubscribe)

    def _kept(self, job: Job, settings: Settings) -> Json:
        kept = super()._kept(job, settings)
        return {**kept, "start": launched.told_of(self._start)} if self.engine == LAUNCHED else kept

    def _tasks(self, job: Job, settings: Settings) -> int:
        return 0  # they are on the hosts of the cluster

    def _run(
        self,
        job: Job,
        settings: Settings,
        view: View | None,
        began: float,
        evaluated: bool,
        script: list[str] | None = None,
    ) -> Json:
        self._starter()  # before the run folder is created
        if self.engine not in MET:
            return super()._run(job, settings, view, began, evaluated, script)
        status, meeting = 1, self._meeting()
        try:
            if self.engine == LAUNCHED:
                before = launched.run_before(self._start, job.out, meeting.restarts)
                job = _again(job, before) if before else job
            result = super()._run(job, settings, view, began, evaluated, script)
            status = INTERRUPTED if result["outcome"] == Outcome.INTERRUPTED else 0
            return result
        except Interrupted:
            status = INTERRUPTED
            raise
        finally:
            meeting.dismiss(status)

    def _starter(self) -> Engine:
        if self.engine == "ssh":
            return RemoteShell(self.remote_shell, self.interface)
        if self.remote_shell != "ssh":
            raise UsageError(
                f"--remote-shell {self.remote_shell}: {self.engine} starts the agents; leave it off, or --on ssh"
            )
        if self.engine in MET:
            return self._meeting()
        return SlurmSteps({host.name: host.slots for host in self.named}, self.interface)

    def check(self, task: str = "", data_dir: str = "", every_two: bool = False) -> list[HostReport]:
        """Report the state of each host before a job, with its problems and their remedies.

        Args:
            task: the task whose data to look for; "" for none.
            data_dir: the folder of the data; "" for the default of a job.
            every_two: whether to measure every pair of hosts, however many they are.

        Raises:
            UsageError: hosts are malformed, or the engine is not installed.
        """
        self.attend()
        with signals.waitable() as woken:
            names = [host.name for host in self.named]
            try:
                job = OpenJob("", passed_on(), [], task, data_dir)
                return check_hosts(self._starter(), names, self.interface, job, every_two, woken)
            finally:
                if self.engine in MET:
                    self._meeting().dismiss(0)

    def make_processes(self, attempt: Attempt, evaluated: bool) -> Callable[[Hooks], HostProcesses]:
        job, run = attempt.job, attempt.folder.path if attempt.folder else Path()
        everybody, ordered = job.strategy.roles(evaluated), self.ordered

        def begin(woken: Connection) -> Opened:
            mark = run.absolute() / f".hosts-{secrets.token_hex(8)}"
            mark.touch()
            try:
                names = [host.name for host in ordered.hosts]
                opened = open_hosts(self._starter(), names, str(mark), self.interface, woken)
            finally:
                mark.unlink(missing_ok=True)
            opened.told += ordered.notes
            return opened

        def place(opened: Opened) -> Placement:
            sites = []
            for at, (host, agent) in enumerate(zip(ordered.hosts, opened.agents, strict=True)):
                greeting = agent.greeting
                assert greeting
                devices = greeting.gpus if job.device.startswith("cuda") else greeting.cores
                sites.append(HostSlots(host.name, host.slots or devices, greeting.keeps, ordered.switch_of(at)))
            return self._place(attempt.settings, everybody, sites)

        return lambda hooks: HostProcesses(hooks, begin, place, self.leave_within)


class Ray(Cluster):
    """Place on the nodes of a running Ray cluster, by default this machine's: `Ray("10.0.0.1:6379")`.

    Its options are those of `Cluster`.
    """

    def __init__(self, address: str = "", **options: Any) -> None:
        super().__init__(on=f"ray:{address}" if address else "ray", **options)


class Slurm(Cluster):
    """Place on the nodes of this process's allocation (salloc, sbatch): `Slurm()`, with options as for `Cluster`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(on="slurm", **options)


def _again(job: Job, before: Path) -> Job:
    """Return the job for a launcher's restart: it resumes from the newest checkpoint, or begins anew without one."""
    from distbelief.record.checkpoints import Checkpoints  # imports torch

    if Checkpoints(before).latest() is not None:
        return replace(job, out=str(before), resume=True)
    if before.exists():
        number = 1
        while (aside := before.with_name(f"{before.name}.{number}")).exists():
            number += 1
        before.rename(aside)
    return job


ENGINES = ("", "ssh", "slurm", "ray")
INTERRUPTED = 130
"""Exit status of an interrupted job."""
MET = LAUNCHED, RAY = "launched", "ray"
"""Engines whose agents come to a meeting; the first is for a command that a launcher has started several times."""
ELSEWHERE = {
    "transport": "between hosts it is always tcp: leave it off",
    "bind": "each listens at its own address: leave it off, or choose that with --interface",
    "advertise": "each announces its own address: leave it off, or choose that with --interface",
    "listen": "leave it off, and name the other machines as hosts",
    "tls": "links between hosts are encrypted in any case: leave it off",
}
"""Options that only one host has, and the remedy for each."""
