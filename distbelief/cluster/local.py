"""The local cluster: every role a process of this machine."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief import errors
from distbelief.cluster import signals
from distbelief.cluster.pace import Pace
from distbelief.core import roles
from distbelief.core.settings import Settings, option
from distbelief.core.values import Checked, admit, shown
from distbelief.errors import UsageError, unknown
from distbelief.job import Job
from distbelief.schedules.allreduce import check_hosts

if TYPE_CHECKING:
    from distbelief.cluster.authority import Authority
    from distbelief.cluster.gate import Gate, Knock, Part, Sorry
    from distbelief.cluster.sitting import View
    from distbelief.tasks import Task

TRANSPORTS = ("shared", "tcp")
ANYWHERE = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}
"""Hosts to bind that are no address to tell others; with each, somebody far away of its family."""
PORTS = 65535
PROCESSES = 4096
"""Most replicas and most shards on one machine, each of them a process."""
ROLES = 2
"""Processes of a job beside its replicas and shards: coordinator and evaluator."""
FILES, FILES_EACH = 30, 5
"""Open files of a process with torch imported and a run folder, and of those for each process of its job: a supervisor has most of them."""
REACH_SECONDS = 2.0
"""How long this machine may take to reach itself."""
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
MANY = 16
"""More shards than this are held against the parameters of the model before any process is started; fewer, when the first replica has made it."""
_BIND = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]+))?|(?P<bare>[^:\[\]]*:[^:\[\]]*:[^\[\]]*)")


@dataclass(frozen=True)
class Local(Checked):
    """Processes of this machine."""

    transport: str = "shared"
    """How bytes travel: shared (memory) or tcp."""
    bind: str = "127.0.0.1"
    """With tcp, HOST or HOST:PORT: the coordinator listens at that port and the shards at the next ones; standbys, and all where there is no
    PORT, at any that are free."""
    advertise: str = ""
    """With tcp, the host that others are told to reach them at; else that of --bind, or this machine's own address where that is 0.0.0.0."""
    insecure: bool = False
    """Plain TCP on any network, to be read and forged by whoever is there; else links beyond loopback are encrypted, and closed to others."""
    tls: bool = False
    """With tcp, encrypt links on loopback too."""
    listen: str = ""
    """HOST or HOST:PORT where other machines may join: writes a ticket into the run folder, for `distbelief join`. The coordinator and the shards
    listen at the ports after it. It implies --transport tcp."""
    pace: Pace | None = None
    """Sleep after each step, so that replicas are as slow as this has them; a step that is slower is its own least."""

    @property
    def carrier(self) -> str:
        """The transport, with what --listen implies."""
        return "tcp" if self.listen else self.transport

    @property
    def bound(self) -> str:
        """Where the roles listen: as `bind`, or after the gate of --listen."""
        if not self.listen:
            return self.bind
        host, port = _host_and_port(self.listen, "--listen")
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{port + 1}" if port else shown

    @property
    def advertised(self) -> str:
        """The host that others are told."""
        return told_host(self.bound, self.advertise)

    def gate(self, job: str, authority: Authority | None, admit: Callable[[Knock], Part | Sorry], run: Path) -> Gate:
        """Open the gate of --listen.

        Raises:
            UsageError: it cannot listen there.
        """
        from distbelief.cluster.gate import Gate

        return Gate(job, _host_and_port(self.listen, "--listen"), self.advertised, authority, admit, run)

    def authority(self, job: str) -> Authority | None:
        """Who certifies the roles of a job, where links are TLS."""
        if not self.encrypted:
            return None
        from distbelief.cluster.authority import Authority

        return Authority(job)

    @property
    def encrypted(self) -> bool:
        """Whether the links are TLS: where that was asked for, and on any network but loopback, unless `insecure`."""
        if self.carrier != "tcp" or self.insecure:
            return False
        return self.tls or not (_is_loopback(_host_and_port(self.bound)[0]) and _is_loopback(self.advertised))

    def run(self, job: Job, view: View | None = None) -> dict[str, Any]:
        """Run a job to its end; returns what `result.json` holds, and the run folder as `run`.

        Raises:
            DistbeliefError: the job could not begin, or failed; its processes are ended in any case.
        """
        began = time.monotonic()
        settings = self.settings(job)
        _allow_files(settings)
        from distbelief.cluster.running import Running
        from distbelief.cluster.sitting import Sitting, evaluates
        from distbelief.tasks import available, resolve

        if not job.reference:
            raise UsageError(
                "the task has no name by which other processes can make it (one that was changed has lost its own): put a function that returns it"
                " in a module, and name that: 'module:function'"
            )
        if why := available(job.reference, job.data_dir):
            raise errors.DataError(why)
        task = resolve(job.reference, job.data_dir)
        evaluated = evaluates(settings, task)
        if settings.shards > MANY:
            _check_cut(task, settings)
        with signals.waitable() as woken:
            return Running(self, job, settings, Sitting(job, settings, view, began), evaluated).run(woken)

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
        settings = msgspec.structs.replace(self.settings(job), evaluate_every=0)
        _allow_files(settings)
        for name in ("evaluate_every", "target_accuracy", "data_dir"):
            if (value := getattr(job, name)) and value != getattr(Job, name):
                raise UsageError(f"{option(name)} {value}: is of a task, and a script reads and measures by itself: leave it off")
        if settings.descent:
            raise UsageError(
                f"strategy {job.strategy.name} evaluates a batch as often as its line search asks, which no loop of a script can: give it a task,"
                " distbelief train module:function sandblaster"
            )
        if settings.mapped:
            raise UsageError(
                f"strategy {job.strategy.name} needs a task, distbelief train module:function {job.strategy.name}: a loop of a script steps when it"
                " likes, and would see parameters change between any two of its lines"
            )
        if not os.path.isfile(script[0]):
            raise UsageError(f"script {script[0]!r} is no file; name the Python script that every replica runs")
        if not job.strategy.served:
            raise UsageError(f"strategy {job.strategy.name} has no replicas to run a script in; run it with python itself")
        from distbelief.cluster.running import Running
        from distbelief.cluster.sitting import Sitting

        with signals.waitable() as woken:
            return Running(self, job, settings, Sitting(job, settings, view, began), False, script).run(woken)

    def _check_ports(self, last: str) -> None:
        """Refuse ports that there are not, by the option that named the first of them.

        Raises:
            UsageError: naming it.
        """
        where, first = ("--listen", self.listen) if self.listen else ("--bind", self.bind)
        _, port = _host_and_port(first, where)
        if port > PORTS:
            raise UsageError(f"{where} {first}: port {port} is higher than any; choose one up to {PORTS}, or leave it off for any that is free")
        listen_at(self.bound, last, f"{where} {first}")

    def _check_assembled(self, settings: Settings) -> None:
        """Refuse what a job without a server cannot do."""
        if self.listen:
            raise UsageError(f"--listen {self.listen}: strategy {settings.consistency} has no server that guests could join; leave it off")
        if self.encrypted:
            raise UsageError(
                f"strategy {settings.consistency} over a network is torch.distributed's, which encrypts nothing: allow that with --insecure, on a"
                " network where nobody else can read or forge it"
            )

    def settings(self, job: Job) -> Settings:
        """What every role of a job is told here.

        Raises:
            UsageError: a strategy or option that has no meaning here, or more processes than a machine may have.
        """
        admit(job, Job, f"job={shown(job)}")
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        given = [option(name) for name in ("bind", "advertise", "insecure", "tls") if getattr(self, name) != getattr(Local, name)]
        if self.listen and self.bind != Local.bind:
            raise UsageError(f"--listen {self.listen} says where everybody listens: leave off --bind {self.bind}")
        if given and self.carrier != "tcp":
            raise UsageError(f"{given[0]} is of addresses, and shared memory has none: it needs --transport tcp")
        if self.tls and self.insecure:
            raise UsageError("--tls and --insecure exclude each other: leave one of them off")
        settings = job.settings()
        if settings.among_themselves:
            self._check_assembled(settings)
        if settings.mapped and self.carrier != "shared":
            asked = f"--listen {self.listen}" if self.listen else f"--transport {self.transport}"
            raise UsageError(f"{asked}: strategy {settings.consistency} is of one machine, whose memory its replicas update; leave it off")
        if not job.strategy.served and (self.transport != Local.transport or self.pace):
            asked = "a pace" if self.pace else f"--transport {self.transport}"
            raise UsageError(f"{asked}: strategy {job.strategy.name} is one process, which sends nothing and is padded by nobody: leave it off")
        if settings.among_themselves:
            check_hosts(settings.algorithm, settings.per_host, auto=self.carrier == "tcp")
        if self.listen and not job.strategy.served:
            raise UsageError(f"--listen {self.listen}: strategy {job.strategy.name} has no replicas that could join")
        for name in ("replicas", "shards"):
            if (count := getattr(settings, name)) > PROCESSES:
                raise UsageError(f"{option(name)} {count}: must be at most {PROCESSES} on one machine, each is a process; more can be simulated")
        if self.pace:
            self.pace.check(settings.replicas)
        self._check_ports(roles.shard(settings.shards - 1))
        if self.carrier == "tcp":
            _check_network(_host_and_port(self.bound)[0], self.advertised)
        if settings.read_in_place and self.carrier != "shared":
            raise UsageError("--read-in-place reads shared memory: it needs --transport shared")
        return settings


def _check_cut(task: Task, settings: Settings) -> None:
    """Refuse more shards than the model of a task has parameters."""
    import torch

    from distbelief.core.sharding import cut
    from distbelief.tasks.flat import layout_of
    from distbelief.tasks.worker import build_model

    with torch.random.fork_rng(devices=[]):
        cut(layout_of(build_model(task, settings.seed, "cpu")), settings.shards)


def listen_at(bind: str, role: str, asked: str = "") -> str:
    """Where a role listens, by what `Local.bind` says: the coordinator at the port named there, shard i at the i-th after it, a standby anywhere.

    Raises:
        UsageError: it is no HOST or HOST:PORT, or the role's port would be too high.

    >>> [listen_at("10.0.0.1:7000", role) for role in ("coordinator", "shard 2", "standby 2")], listen_at("::1", "shard 2")
    (['tcp:10.0.0.1:7000', 'tcp:10.0.0.1:7003', 'tcp:10.0.0.1:0'], 'tcp:[::1]:0')
    """
    host, first = _host_and_port(bind)
    # a standby keeps its port when it is its shard, and then there is another standby of the same name
    port = first + 1 + roles.index_of(role) if first and roles.kind(role) is not roles.Kind.STANDBY else 0
    if port > PORTS:
        raise UsageError(f"{asked or f'--bind {bind}'}: {role} would listen at port {port}, and there are {PORTS}; choose a lower one")
    return f"tcp:{f'[{host}]' if ':' in host else host}:{port}"


def _allow_files(settings: Settings) -> None:
    """Have this process and those that it starts open as many files as a job needs.

    Raises:
        UsageError: the machine forbids it.
    """
    needed = FILES + FILES_EACH * (settings.replicas + settings.shards * (1 + settings.standby) + ROLES)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (allowed, most) or needed <= allowed:
        return
    if needed > most:
        raise UsageError(
            f"this job needs some {needed} open files in one process, and this machine allows {most}: raise that (ulimit -n {needed}), or have fewer"
            " --replicas or --shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _check_network(bound: str, told: str) -> None:
    """Refuse a machine that has no way to itself: each of its roles would find that out by itself, life after life.

    Whether an address is forwarded for the ports of a job only, or is slow, is not for this to judge.
    """
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((bound, 0))
        except OSError:
            return  # told, with the remedy, by whoever is to listen there
        listener.listen(1)
        try:
            socket.create_connection((told, listener.getsockname()[1]), REACH_SECONDS).close()
        except OSError as error:
            if error.errno not in UNREACHABLE:
                return
            remedy = "bring up its loopback (ip link set lo up)" if _is_loopback(told) else "name another with --advertise"
            raise UsageError(
                f"--transport tcp: this machine cannot reach itself at {told}: {error.strerror}; {remedy}, or use --transport shared, which needs no"
                " network"
            ) from error


def told_host(bind: str, advertise: str) -> str:
    """The host that others are told: `advertise`, else that of `bind`; where that is every address, this machine's own towards the world.

    >>> told_host("10.0.0.1:7000", ""), told_host("0.0.0.0", "node7")
    ('10.0.0.1', 'node7')
    """
    host, _ = _host_and_port(bind)
    if advertise or host not in ANYWHERE:
        return advertise or host
    family, far = ANYWHERE[host]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing: the kernel only chooses its route
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback, by all of its addresses; one that is not known is not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)


def _host_and_port(bind: str, where: str = "--bind") -> tuple[str, int]:
    if found := _BIND.fullmatch(bind):
        return found["six"] or found["host"] or found["bare"], int(found["port"] or 0)
    raise UsageError(f"{where} {bind!r}: write HOST or HOST:PORT, such as 10.0.0.1:7000, or [::1]:7000 for an IPv6 number")
