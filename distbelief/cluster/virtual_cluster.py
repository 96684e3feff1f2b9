"""What a virtual cluster is like: its network, compute times, hosts and deaths; and what of a job has no meaning there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from distbelief.cluster.handling import Handling
from distbelief.cluster.pace import Pace
from distbelief.core import roles
from distbelief.core.descent import Descent
from distbelief.core.settings import Settings, option
from distbelief.core.values import Checked, CheckedStruct, admit, shown
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.schedules.allreduce import check_hosts
from distbelief.transport.processors import Hosts
from distbelief.transport.virtual import Weather

PHANTOM_LACKS: Mapping[str, str] = {
    "target_accuracy": "that could reach it",
    "evaluate_every": "that could be measured",
    "checkpoint_every": "that could be kept",
    "keep_checkpoints": "that could be kept",
    "init_from": "that could begin there",
    "line_search": "that could be searched",
    "tolerance": "that could be so small",
}
"""What a phantom has no use for, and why; of what only values depend on (rates, clipping) it takes any."""


class Crash(CheckedStruct, frozen=True):
    """A replica or a shard dies, as by kill -9: as it is about to send its `message`-th message. Its second crash is one of its second life, and so
    on; those that are killed because another shard died, in a synchronous job, begin a new life too.
    """

    role: str
    message: int


@dataclass(frozen=True)
class VirtualCluster(Checked):
    """The options of a virtual cluster, and what they refuse."""

    weather: Weather = Weather()
    """The network."""
    pace: Pace = Pace()
    """The compute times."""
    crashes: tuple[Crash, ...] = ()
    """Who dies, and when."""
    restart_seconds: float = 1.0
    """Time from a crash to the first word of the next life."""
    phantom: bool = False
    """Compute nothing, move no bytes: only the time that passes, to which learning rates and clipping are nothing."""
    keep: bool = False
    """Leave a run folder with metrics, checkpoints and the model."""
    handling: Handling = Handling()
    """What messages cost those who take them; `INSTANT` costs nothing."""
    hosts: Hosts | None = None
    """Machines whose cores several roles share; None gives each role its own."""

    def described(self) -> dict[str, Any]:
        """What this cluster is like, as results tell it."""
        own = {name: getattr(self, name) for name in ("weather", "pace", "handling", "hosts", "crashes", "restart_seconds", "phantom")}
        return dict(msgspec.to_builtins(own, str_keys=True))

    def settings(self, job: Job) -> Settings:
        """What every role of a job is told here.

        Raises:
            UsageError: a strategy or option that has no meaning here.
        """
        admit(job, Job, f"job={shown(job)}")
        settings = job.settings()
        if not job.strategy.served:
            self._check_alone(job.strategy.name)
        if settings.read_in_place:
            raise UsageError("--read-in-place is memory of one machine; a simulated cluster has none: leave it off")
        self._check_used(job, settings)
        if self.phantom:
            settings = msgspec.structs.replace(settings, evaluate_every=0, checkpoint_every=0)
            if settings.descent:  # there is no loss to search for
                settings = msgspec.structs.replace(settings, descent=msgspec.structs.replace(settings.descent, line_search="none", tolerance=0.0))
        if settings.among_themselves and settings.algorithm == "native":
            raise UsageError("--algorithm native is that of a real network's library, and a simulated one has none: name another, or auto")
        self.weather.check()
        self.pace.check(settings.replicas)
        self.handling.check()
        if self.hosts is not None:
            self.hosts.check()
            self._check_hosts(settings, self.hosts)
        self._check_crashes(settings)
        self._check_outages(settings)
        return settings

    def _check_used(self, job: Job, settings: Settings) -> None:
        """Refuse what would do nothing here."""
        asked = [(name, getattr(job, name), getattr(Job, name)) for name in PHANTOM_LACKS if hasattr(job, name)]
        if settings.descent:
            asked += [(name, getattr(settings.descent, name), getattr(Descent(), name)) for name in PHANTOM_LACKS if hasattr(Descent, name)]
        for name, value, usual in asked if self.phantom else ():
            if value not in (usual, 0, "none"):
                raise UsageError(f"{option(name)} {value}: --phantom computes nothing {PHANTOM_LACKS[name]}; leave one of them off")
        if job.keep_checkpoints != Job.keep_checkpoints and not (self.keep or job.out):
            raise UsageError(
                f"--keep-checkpoints {job.keep_checkpoints}: a simulation without a run folder leaves no checkpoints: give it one with --keep or"
                " --out, or leave it off"
            )
        if self.weather.reduction and not (settings.among_themselves or settings.mapped):
            raise UsageError(
                "--network reduce: says how fast replicas add to what others have, which they do with strategies allreduce, hogwild and locking; with"
                f" {settings.consistency} they do not: leave it off"
            )
        within = self.weather.local_latency or self.weather.local_bandwidth
        if within and not (self.hosts or (settings.among_themselves and settings.per_host)):
            needs = "set --hosts or --per-host" if settings.among_themselves else "say with --hosts who is on one, or leave it off"
            raise UsageError(f"--network local-latency and local-bandwidth are of links inside a host: {needs}")
        if settings.among_themselves and not within and not self.hosts:
            check_hosts(settings.algorithm, settings.per_host, auto=True)

    def _check_alone(self, strategy: str) -> None:
        """Refuse what means nothing to a loop that has nobody to talk to."""
        if self.weather != Weather():
            raise UsageError(f"--network and delays mean nothing to strategy {strategy}, which sends nothing: leave them off")
        if self.handling.message != Handling().message:
            raise UsageError(f"--handling message means nothing to strategy {strategy}, which is told nothing: leave it off")
        if self.hosts is not None:
            raise UsageError(f"--hosts means nothing to strategy {strategy}, which has one machine for one role: leave it off")
        if self.crashes or self.restart_seconds != 1.0:
            raise UsageError(f"--faults crash and restart mean nothing to strategy {strategy}: nobody could go on; leave them off")

    def _check_hosts(self, settings: Settings, hosts: Hosts) -> None:
        if hosts.replicas > settings.replicas:
            raise UsageError(f"hosts with {hosts.replicas} replicas: there are {settings.replicas}; leave it off for one host with all roles")
        if settings.per_host and settings.per_host != (hosts.replicas or settings.replicas):
            raise UsageError(f"--per-host {settings.per_host}: the hosts have {hosts.replicas or settings.replicas} replicas; name the same number")
        if settings.mapped and hosts.replicas not in (0, settings.replicas):
            raise UsageError(f"hosts with {hosts.replicas} replicas: all {settings.replicas} update one memory, on one host; leave it off")

    def _check_crashes(self, settings: Settings) -> None:
        if not 0 <= self.restart_seconds < float("inf"):
            raise UsageError(f"restart_seconds {self.restart_seconds}: must be 0 or more, and finite")
        dying = [crash.role for crash in self.crashes]
        for crash in self.crashes:
            if crash.role not in _there(settings):
                raise UsageError(f"{crash.role} cannot crash: there are {_told(settings)}")
            if not 1 <= crash.message < 1 << 63:
                raise UsageError(f"{crash.role} cannot crash at message {crash.message}: its messages are counted from 1, in 64 bits")
            if (many := dying.count(crash.role)) > 1 + settings.restarts:
                raise UsageError(f"{crash.role} cannot crash {many} times: it comes back {settings.restarts} times (--restarts)")
            if crash.role == roles.COORDINATOR and many > settings.restarts:
                raise UsageError(f"the coordinator cannot crash {many} times: it comes back {settings.restarts} times (--restarts), and ends the job")

    def _check_outages(self, settings: Settings) -> None:
        there = _there(settings)
        for outage in self.weather.outages:
            if strange := [role for role in outage.side if role not in there]:
                raise UsageError(f"{strange[0]} cannot be cut off: there are {_told(settings)}")
            if there <= {*outage.side}:
                raise UsageError(f"the outage at {outage.start} s has everybody on one side, and cuts nobody off: leave somebody out")


def server_roles(settings: Settings) -> list[str]:
    """The shards of a job, and their standbys."""
    shards = 0 if settings.among_themselves or settings.mapped else settings.shards
    return [*map(roles.shard, range(shards)), *map(roles.standby, range(shards * settings.standby))]


def job_roles(settings: Settings) -> list[str]:
    """The replicas of a job, its shards, and their standbys."""
    return [*map(roles.replica, range(settings.replicas)), *server_roles(settings)]


def _there(settings: Settings) -> set[str]:
    """Whom a fault may strike."""
    return {roles.COORDINATOR, *job_roles(settings), *[roles.EVALUATOR] * _measured(settings)}


def _measured(settings: Settings) -> bool:
    """Whether an evaluator takes part."""
    return bool(settings.evaluate_every) and not settings.among_themselves


def _told(settings: Settings) -> str:
    """Whom a fault may strike, in words."""
    serve = "" if settings.among_themselves or settings.mapped else f" and shards 0 to {settings.shards - 1}"
    there = f"the coordinator, {'the evaluator, ' * _measured(settings)}replicas 0 to {settings.replicas - 1}{serve}"
    return there + (", each with a standby" if settings.standby else "")
