"""Base classes of strategies: their options, roles, and the options that mean nothing to them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from distbelief.core import roles
from distbelief.core.roles import Mesh
from distbelief.core.settings import Holder, Settings, StrategyOptions, among, know
from distbelief.errors import LocalProtocolError, UsageError
from distbelief.split.options import Partitions

if TYPE_CHECKING:
    from distbelief.strategies.context import Loop, LoopContext
    from distbelief.strategies.players import Players

AUTO, SERVED, DIRECT = "auto", "served", "direct"
PATHS = (AUTO, DIRECT, SERVED)
"""Paths of updates. The shards' processes make them (served), or replicas do, in memory that they share (direct)."""


class LocalMachine(Protocol):
    """The processes of one machine, as a strategy sees them."""

    @property
    def listen(self) -> str:
        """HOST or HOST:PORT where guests may join; "" where they may not."""

    @property
    def transport(self) -> str:
        """The transport that the user chose."""

    @property
    def carrier(self) -> str:
        """The transport in use: shared or tcp."""

    @property
    def encrypted(self) -> bool:
        """True if links are encrypted with TLS."""


class Virtual(Protocol):
    """A simulated cluster, as a strategy sees it."""

    @property
    def phantom(self) -> bool:
        """True if nothing is computed."""

    @property
    def sends(self) -> bool:
        """True if the user sets the network's speed or delay."""

    @property
    def messages(self) -> bool:
        """True if the user sets the time that a message costs."""

    @property
    def adds(self) -> bool:
        """True if the user sets how fast gradients are added up."""

    @property
    def local(self) -> bool:
        """True if the user sets the speed of links inside a host."""

    @property
    def host_replicas(self) -> int | None:
        """Replicas on each host; 0 puts all on one, None gives each role its own machine."""

    @property
    def faulty(self) -> bool:
        """True if roles crash, or if the user sets the time until they restart."""


@dataclass(frozen=True)
class Strategy(StrategyOptions):
    """A way to train. Its fields are options, and the fields' docstrings their help.

    A user's strategy is a frozen dataclass at the top of a module, called `module:Class`. Each field has a default, and
    a type that msgspec encodes.
    """

    meaningless: ClassVar[Mapping[str, str]] = {"path": "none of its replicas updates the memory of a shard"}
    """Options that mean nothing here and why, with those of all bases; "" for an option that means something again."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        tables = [vars(base).get("meaningless", {}) for base in reversed(cls.__mro__)]
        cls.meaningless = {name: why for table in tables for name, why in table.items()}
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"
            know(cls.name, cls)

    @classmethod
    def players(cls) -> Players:
        """Return the players of the roles, for a job of several processes. Imports torch.

        A strategy that runs in one process has none, and raises a `LocalProtocolError`.
        """
        raise LocalProtocolError(f"strategy {cls.name} has no players: one process runs the whole job")

    @classmethod
    def loop(cls, context: LoopContext) -> Loop:  # noqa: ARG003  # for strategies that have one
        """Return the loop of a strategy that runs in one process. Imports torch.

        A strategy of several processes has none, and raises a `LocalProtocolError`.
        """
        raise LocalProtocolError(f"strategy {cls.name} has no loop of its own: its roles have players")

    def phantom(self, settings: Settings) -> Settings:
        """Return the settings of a simulated job in which nothing is computed."""
        return settings

    def roles(self, measured: bool) -> tuple[str, ...]:
        """List the roles of a job; `single` where one process runs the whole job.

        Args:
            measured: whether the model is measured. An evaluator does that where the replicas do not hold the model.
        """
        shards = self.parts if self.held_by is Holder.SHARDS else 0
        return (
            *roles.replicas(Mesh(getattr(self, "replicas", 1), getattr(self, "partitions", 1))),
            roles.COORDINATOR,
            *roles.servers(shards, getattr(self, "standby", 0)),
            *[roles.EVALUATOR] * (measured and self.held_by is not Holder.REPLICAS),
        )

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """Return whether the processes of a job share memory that outlives each of them."""
        return False

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Return why the replicas cannot update the shards' memory themselves; "" where they can."""
        return f"strategy {self.name} has no shards whose memory its replicas could update"

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        """Refuse, with a `UsageError`, options that mean nothing to processes of one machine."""

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        """Refuse, with a `UsageError`, options that mean nothing on a simulated cluster."""
        if cluster.adds:
            raise UsageError(
                "--network reduce: sets how fast replicas add up gradients, which they do with strategies allreduce "
                f"and hogwild, and not with {self.name}: leave it off"
            )
        check_local_links(cluster)


def is_alone(strategy: Strategy) -> bool:
    """Return whether one process runs the whole job."""
    return roles.SINGLE in strategy.roles(measured=False)


def check_local_links(cluster: Virtual) -> None:
    """Refuse, with a `UsageError`, links inside a host where each role has its own machine."""
    if cluster.local and cluster.host_replicas is None:
        raise UsageError(
            "--network local-latency and local-bandwidth are of links inside a host: put roles on one host with "
            "--hosts, or leave it off"
        )


def path_of(choice: str, strategy: Strategy, settings: Settings, carrier: str, lacking: str = "") -> str:
    """Return the path of a job's updates.

    `choice` is one of `PATHS`; auto takes the direct path where it can. `carrier` says how bytes travel between
    replicas and shards: shared or tcp. `lacking` says why the place has no direct path; "" where it has one.

    A choice that the job cannot take raises a `UsageError`.
    """
    among("path", choice, PATHS)
    why = strategy.served_because(settings, carrier)
    if not why and strategy.needs_memory(settings, carrier):  # served is the only path of this strategy
        return DIRECT
    why = why or lacking
    if choice == DIRECT and why:
        raise UsageError(f"--path direct: {why}; leave it off")
    return SERVED if why or choice == SERVED else DIRECT


@dataclass(frozen=True)
class Replicated(Strategy):
    """A strategy that trains several copies of the model."""

    replicas: int = 2
    """Copies of the model, each in its own process."""
    restarts: int = field(default=3, kw_only=True)
    """Times that a dead process of the job (replica, shard, standby or coordinator) is started again."""


@dataclass(frozen=True)
class Partitioned(Partitions, Strategy):
    """A strategy whose model may be split over several processes."""

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        if machine.listen and self.partitions > 1:
            raise UsageError(
                f"--listen {machine.listen}: a guest is one process, and replicas are split over {self.partitions}; "
                "leave one of them off"
            )
        super().check_machine(settings, machine)


@dataclass(frozen=True)
class Splittable(Partitioned, Replicated):
    """A strategy whose replicas may each be split over several processes."""


@dataclass(frozen=True)
class Served(Replicated):
    """A strategy whose parameters are held by shards, under a coordinator."""

    shards: int = 2
    """Server processes that share the parameters."""
    standby: int = field(default=0, kw_only=True)
    """1: each shard has a standby process, which holds every update that the shard has acknowledged, and takes its
    place when it dies.
    """

    @property
    def parts(self) -> int:
        return self.shards

    def served_because(self, settings: Settings, carrier: str) -> str:
        return f"strategy {self.name} has the shards' processes make the updates"


@dataclass(frozen=True)
class Scaled(Strategy):
    """A strategy whose learning rate can grow with its global batch (Goyal et al. 2017, section 2.1)."""

    lr_scaling: str = field(default="none", kw_only=True)
    """How --lr, which is for --base-batch, grows with a global batch k times as large: linear (times k), sqrt (times
    its root), or none. The global batch is replicas x batch size x minibatches of each in a round.
    """
    base_batch: int = field(default=0, kw_only=True)
    """The global batch that --lr is for; needed by --lr-scaling linear and sqrt."""
