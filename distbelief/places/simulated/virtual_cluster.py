"""Options of a virtual cluster: network, compute times, hosts and deaths; and the checks of a job on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from distbelief.core import roles
from distbelief.core.settings import SORTED, Check, Settings, option
from distbelief.core.values import Checked, CheckedStruct
from distbelief.errors import UsageError
from distbelief.job import Job, refusals, refuse
from distbelief.network.graph import Routes
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import Handling
from distbelief.places.topologies import topology
from distbelief.strategies import Strategy
from distbelief.strategies.base import AUTO, path_of
from distbelief.transport.cluster_model import Hosts, NetworkModel

PHANTOM_LACKS: Mapping[str, str] = {
    "target_accuracy": "that could reach it",
    "target_loss": "that could reach it",
    "evaluate_every": "that could be measured",
    "checkpoint_every": "that could be kept",
    "keep_checkpoints": "that could be kept",
    "init_from": "that could begin there",
    "precision": "in any precision",
    "fixed_point": "in any precision",
}
"""Options of a job that a phantom refuses, and why; it accepts and ignores rates and clipping."""


class Crash(CheckedStruct, frozen=True):
    """Death of a role, as by kill -9, when it is about to send its `message`-th message.

    The next crash of a role counts the messages of its next incarnation. In a synchronous job a shard's death ends
    other roles too, and these also begin a new incarnation. On the direct path, answers that replicas find in a shard's
    memory count as messages of the shard; a death ends its process, and the memory lasts.
    """

    role: str
    message: int


class LeavingHost(CheckedStruct, frozen=True):
    """Order for a replica's host to leave, given when the replica is about to send its `message`-th message.

    Within `seconds` the replica finishes the work that it has begun, and leaves.
    """

    role: str
    message: int
    seconds: float


@dataclass(frozen=True)
class VirtualCluster(Checked):
    """Options of a virtual cluster, and the checks of a job on it."""

    network: NetworkModel = NetworkModel()
    """The network."""
    compute: ComputeModel = ComputeModel()
    """The compute times."""
    crashes: tuple[Crash, ...] = ()
    """Deaths of roles."""
    restart_seconds: float = 1.0
    """Seconds from a crash to the first message of the next incarnation."""
    phantom: bool = False
    """Compute nothing and move no bytes; only time passes. Learning rates and clipping have no effect."""
    keep: bool = False
    """Leave a run folder with metrics, checkpoints and the model."""
    handling: Handling = Handling()
    """Costs of messages to the roles that receive them; `INSTANT` costs nothing."""
    hosts: Hosts | None = None
    """Machines whose cores several roles share; None gives each role its own."""
    path: str = AUTO
    """Path of updates: served (made by the shards), direct (made by each replica, in the memory of the one host of all
    roles, under the shards' locks), or auto (direct where the job allows it).
    """
    leaves: tuple[LeavingHost, ...] = ()
    """Hosts of replicas that leave during the job, and when."""
    topology: str = ""
    """Switches and cables between hosts: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or Slurm's
    topology.conf; each replica has its own host unless `hosts` places them otherwise. No topology if empty."""

    def described(self) -> dict[str, Any]:
        """Return the description of this cluster for results: all options but `keep`."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "keep"}
        return dict(msgspec.to_builtins(own, str_keys=True))

    def settings(self, job: Job) -> Settings:
        """Return the settings that every role of a job gets here.

        Raises:
            UsageError: an option has an impossible value, or no meaning here.
        """
        refuse(refusals(job, self))
        return self._played(job, job.unchecked)

    def _played(self, job: Job, settings: Settings) -> Settings:
        """Return the settings that the simulation uses: a phantom measures nothing and saves no checkpoints."""
        if not self.phantom:
            return settings
        return job.strategy.phantom(dataclasses.replace(settings.unmeasured(), checkpoint_every=0))

    def checks(self, job: Job, settings: Settings) -> Iterator[Check]:
        """Yield the checks of a job here."""
        strategy, played = job.strategy, self._played(job, settings)
        yield partial(self._check_used, job)
        yield partial(strategy.check_virtual, settings, self)
        yield self.network.check
        yield partial(self.compute.check, played.replicas)
        yield self.handling.check
        if self.hosts is not None:
            yield self.hosts.check
            yield partial(self._check_hosts, played, self.hosts)
        yield partial(self._check_crashes, strategy, played)
        yield partial(self._check_leaves, strategy, played)
        yield partial(self._check_outages, strategy, played)
        yield partial(self.path_of, strategy, played)
        yield partial(self.routed, played, job.seed, strategy.needs_memory(played, "virtual"))

    def routed(self, settings: Settings, seed: int, shared: bool = False) -> tuple[Routes, tuple[int, ...]] | None:
        """Return the routes of the topology, and its hosts that the job uses; None without a topology.

        A job whose replicas share memory has one host.

        Raises:
            UsageError: there is no such topology, it has too few hosts, or the job would send nothing over it.
        """
        if not self.topology:
            return None
        if self.network.bandwidth == float("inf"):
            raise UsageError(f"--topology {self.topology}: links have a bandwidth that is finite: give --network one")
        found, per_host = topology(self.topology), settings.strategy.host_replicas or 1
        if self.hosts:
            per_host = self.hosts.replicas or settings.replicas
        hosts = 1 if shared else -(-settings.replicas // per_host)
        if hosts == 1:
            raise UsageError(
                f"--topology {self.topology}: all roles are on one host, which sends nothing; leave it off"
            )
        return Routes(found, seed), found.first(hosts, f"a job of {settings.replicas} replicas, {per_host} a host,")

    @property
    def one_host(self) -> bool:
        """Return whether all roles are on one host."""
        return self.hosts is not None and not self.hosts.replicas

    def path_of(self, strategy: Strategy, settings: Settings) -> str:
        """Return the path of a job's updates here: served or direct.

        Raises:
            UsageError: there is no such path, or this job cannot use it.
        """
        lacking = ""
        if self.hosts is None:
            lacking = "replicas and shards are on machines of their own; put all on one with --hosts cores=N"
        elif self.hosts.replicas:
            lacking = "only the roles of one host share memory; --hosts without replicas=N puts all on one"
        return path_of(self.path, strategy, settings, "shared", lacking)

    def _check_used(self, job: Job) -> None:
        """Refuse options that would have no effect here."""
        for name, why in PHANTOM_LACKS.items() if self.phantom else ():
            if (value := getattr(job, name)) not in (getattr(Job, name), 0):
                raise UsageError(f"{option(name)} {value}: --phantom computes nothing {why}; leave one of them off")
        if self.phantom and job.data == SORTED:
            raise UsageError(f"--data {SORTED}: --phantom reads no labels to cut by; leave one of them off")
        if job.keep_checkpoints != Job.keep_checkpoints and not (self.keep or job.out):
            raise UsageError(
                f"--keep-checkpoints {job.keep_checkpoints}: a simulation without a run folder leaves no checkpoints: "
                "give it one with --keep or --out, or leave it off"
            )

    # properties that the checks of a strategy read

    @property
    def sends(self) -> bool:
        return self.network != NetworkModel() or bool(self.topology)

    @property
    def messages(self) -> bool:
        return self.handling.message != Handling().message

    @property
    def adds(self) -> bool:
        return bool(self.network.reduction)

    @property
    def local(self) -> bool:
        return bool(self.network.local_latency or self.network.local_bandwidth)

    @property
    def host_replicas(self) -> int | None:
        return self.hosts.replicas if self.hosts else None

    @property
    def faulty(self) -> bool:
        return bool(self.crashes or self.leaves) or self.restart_seconds != 1.0

    # checks

    def _check_hosts(self, settings: Settings, hosts: Hosts) -> None:
        if hosts.replicas > settings.replicas:
            raise UsageError(
                f"hosts with {hosts.replicas} replicas: there are {settings.replicas}; leave it off for one host with "
                "all roles"
            )
        if (per_host := settings.strategy.host_replicas) and per_host != (hosts.replicas or settings.replicas):
            raise UsageError(
                f"--per-host {per_host}: the hosts have {hosts.replicas or settings.replicas} replicas; name the same "
                "number"
            )

    def _check_crashes(self, strategy: Strategy, settings: Settings) -> None:
        if not 0 <= self.restart_seconds < float("inf"):
            raise UsageError(f"restart_seconds {self.restart_seconds}: must be 0 or more, and finite")
        dying, there = [crash.role for crash in self.crashes], _there(strategy, settings)
        for crash in self.crashes:
            if crash.role not in there:
                raise UsageError(f"{crash.role} cannot crash: there are {_told(there)}")
            if not 1 <= crash.message < 1 << 63:
                raise UsageError(
                    f"{crash.role} cannot crash at message {crash.message}: its messages are counted from 1, in 64 bits"
                )
            if (many := dying.count(crash.role)) > 1 + settings.restarts:
                raise UsageError(
                    f"{crash.role} cannot crash {many} times: it comes back {settings.restarts} times (--restarts)"
                )
            if crash.role == roles.COORDINATOR and many > settings.restarts:
                raise UsageError(
                    f"the coordinator cannot crash {many} times: it comes back {settings.restarts} times "
                    "(--restarts), and ends the job"
                )

    def _check_leaves(self, strategy: Strategy, settings: Settings) -> None:
        going = [leave.role for leave in self.leaves]
        if going and strategy.needs_memory(settings, "virtual"):
            raise UsageError(f"{going[0]} cannot leave: replicas of strategy {strategy.name} share one host's memory")
        for leave in self.leaves:
            if leave.role not in filter(roles.is_replica, strategy.roles(measured=False)):
                raise UsageError(
                    f"{leave.role} cannot leave: only replicas do, and there are 0 to {settings.replicas - 1}"
                )
            if going.count(leave.role) > 1:
                raise UsageError(f"{leave.role} cannot leave twice: it does not come back; name it once")
            if not 1 <= leave.message < 1 << 63:
                raise UsageError(
                    f"{leave.role} cannot leave at message {leave.message}: its messages are counted from 1, in 64 bits"
                )
            if not 0 < leave.seconds < float("inf"):
                raise UsageError(
                    f"{leave.role} cannot leave within {leave.seconds} s: it must have some time, and a finite one"
                )

    def _check_outages(self, strategy: Strategy, settings: Settings) -> None:
        there = _there(strategy, settings)
        for outage in self.network.outages:
            if strange := [role for role in outage.side if role not in there]:
                raise UsageError(f"{strange[0]} cannot be cut off: there are {_told(there)}")
            if there <= {*outage.side}:
                raise UsageError(
                    f"the outage at {outage.start} s cuts nobody off: everybody is on one side; leave somebody out"
                )


def _there(strategy: Strategy, settings: Settings) -> set[str]:
    """Return the roles that a fault may name."""
    return set(strategy.roles(settings.evaluates))


def _told(there: set[str]) -> str:
    """Return a phrase that lists the roles that a fault may name."""
    kinds = [roles.kind(role) for role in there]
    numbers = sorted((one.index, one.partition) for one in map(roles.parse, filter(roles.is_replica, there)))
    index, partition = numbers[-1]
    replicas = f"0 to {index}" if partition < 0 else f"0.0 to {index}.{partition}"
    measured = "the evaluator, " * (roles.EVALUATOR in there)
    shards = f" and shards 0 to {kinds.count(roles.Kind.SHARD) - 1}" if roles.Kind.SHARD in kinds else ""
    standbys = ", each with a standby" * (roles.Kind.STANDBY in kinds)
    return f"the coordinator, {measured}replicas {replicas}{shards}{standbys}"
