"""Base of strategies: options, the settings that they make, roles, and what has no meaning for them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from distbelief.core import roles
from distbelief.core.roles import Mesh
from distbelief.core.settings import Holder, Settings, StrategyOptions, know
from distbelief.errors import LocalProtocolError, UsageError, unknown
from distbelief.split.options import Partitions

if TYPE_CHECKING:
    from distbelief.strategies.context import Loop, LoopContext
    from distbelief.strategies.players import Players

AUTO, SERVED, DIRECT = "auto", "served", "direct"
PATHS = (AUTO, DIRECT, SERVED)
"""Paths of updates: made by the shards' processes (served), or by replicas in memory shared with them (direct)."""


class LocalMachine(Protocol):
    """Processes of one machine, as far as a strategy asks about them."""

    @property
    def listen(self) -> str:
        """HOST or HOST:PORT where guests may join; "" where none may."""
        ...

    @property
    def transport(self) -> str:
        """The transport that was asked for."""
        ...

    @property
    def carrier(self) -> str:
        """The transport that is used: shared or tcp."""
        ...

    @property
    def encrypted(self) -> bool:
        """Return whether links are TLS."""
        ...


class Virtual(Protocol):
    """A simulated cluster, as far as a strategy asks about it."""

    @property
    def phantom(self) -> bool:
        """Return whether nothing is computed."""
        ...

    @property
    def sends(self) -> bool:
        """Return whether its network is another than usual."""
        ...

    @property
    def messages(self) -> bool:
        """Return whether messages cost another time than usual."""
        ...

    @property
    def adds(self) -> bool:
        """Return whether it says how fast a gradient is added to another."""
        ...

    @property
    def local(self) -> bool:
        """Return whether it says how fast links inside a host are."""
        ...

    @property
    def host_replicas(self) -> int | None:
        """Replicas on each host, 0 for all on one; None where each role has a machine of its own."""
        ...

    @property
    def faulty(self) -> bool:
        """Return whether roles crash, or would come back after another time than usual."""
        ...


@dataclass(frozen=True)
class Strategy(StrategyOptions):
    """A way to train. Its fields are its options, and their docstrings what `--help` says of them.

    One that is written elsewhere is a frozen dataclass at the top of a module; its name is `module:Class`. Its fields
    have defaults, and types that msgspec writes down.
    """

    meaningless: ClassVar[Mapping[str, str]] = {"path": "none of its replicas updates the memory of a shard"}
    """As of `Traits`, with all that its bases say; "" of what means something to it after all."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        tables = [vars(base).get("meaningless", {}) for base in reversed(cls.__mro__)]
        cls.meaningless = {name: why for table in tables for name, why in table.items()}
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"
            know(cls.name, cls)

    @classmethod
    def players(cls) -> Players:
        """Return who plays the roles of a job that has a coordinator; made when first asked for, as it needs torch.

        Raises:
            LocalProtocolError: one process plays everything.
        """
        raise LocalProtocolError(f"strategy {cls.name} has no players: one process plays everything")

    @classmethod
    def loop(cls, context: LoopContext) -> Loop:  # noqa: ARG003  # for those that have one
        """Return what plays everything in one process; made when first asked for, as it needs torch.

        Raises:
            LocalProtocolError: its roles have players.
        """
        raise LocalProtocolError(f"strategy {cls.name} has no loop of its own: its roles have players")

    def phantom(self, settings: Settings) -> Settings:
        """The settings of a job in which nothing is computed."""
        return settings

    def roles(self, measured: bool) -> tuple[str, ...]:
        """List the roles of a job; `single` where one process plays everything.

        Args:
            measured: whether the model is measured, which an evaluator does where no replica holds it.
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
        """Why its replicas cannot update the shards' memory themselves; "" where they can."""
        return f"strategy {self.name} has no shards whose memory its replicas could update"

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        """Refuse what means nothing to it on processes of one machine.

        Raises:
            UsageError: naming the option, and the remedy.
        """

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        """Refuse what means nothing to it on a simulated cluster.

        Raises:
            UsageError: naming the option, and the remedy.
        """
        if cluster.adds:
            raise UsageError(
                "--network reduce: says how fast replicas add to what others have, which they do with strategies "
                f"allreduce and hogwild; with {self.name} they do not: leave it off"
            )
        check_local_links(cluster)


def is_alone(strategy: Strategy) -> bool:
    """Return whether one process plays everything."""
    return roles.SINGLE in strategy.roles(measured=False)


def check_local_links(cluster: Virtual) -> None:
    """Refuse links inside a host where no roles are on one.

    Raises:
        UsageError: nobody has said who is on one host.
    """
    if cluster.local and cluster.host_replicas is None:
        raise UsageError(
            "--network local-latency and local-bandwidth are of links inside a host: say with --hosts who is on one, "
            "or leave it off"
        )


def path_of(asked: str, strategy: Strategy, settings: Settings, carrier: str, lacking: str = "") -> str:
    """The path of a job.

    Args:
        asked: one of `PATHS`; auto is the direct one where that can be.
        strategy: of the job.
        settings: of the job.
        carrier: how bytes travel between its replicas and shards: shared or tcp.
        lacking: what the place lacks for the direct path; "" for nothing.

    Raises:
        UsageError: there is no such path, or none for this job.
    """
    if asked not in PATHS:
        raise unknown("path", asked, PATHS)
    why = strategy.served_because(settings, carrier)
    if not why and strategy.needs_memory(settings, carrier):  # it knows no other path
        return DIRECT
    why = why or lacking
    if asked == DIRECT and why:
        raise UsageError(f"--path direct: {why}; leave it off")
    return SERVED if why or asked == SERVED else DIRECT


@dataclass(frozen=True)
class Replicated(Strategy):
    """A strategy that trains several copies of the model."""

    replicas: int = 2
    """Copies of the model, each in its own process."""
    restarts: int = field(default=3, kw_only=True)
    """Times that each replica, shard or standby, or the coordinator, that died is started anew."""


@dataclass(frozen=True)
class Partitioned(Partitions, Strategy):
    """A strategy whose model may be split over several processes."""

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        """Refuse guests where replicas are split.

        Raises:
            UsageError: naming the option, and the remedy.
        """
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
    """A strategy whose replicas train parameters that shards hold, under a coordinator."""

    shards: int = 2
    """Server processes that share the parameters."""
    standby: int = field(default=0, kw_only=True)
    """1: every shard has a standby process that holds all it has acknowledged, and takes its place when it dies."""

    @property
    def parts(self) -> int:
        """The shards."""
        return self.shards

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Its shards' processes do what it asks of shards."""
        return f"strategy {self.name} has the shards' processes make the updates"


@dataclass(frozen=True)
class Scaled(Strategy):
    """A strategy whose learning rate can grow with its global batch (Goyal et al. 2017, section 2.1)."""

    lr_scaling: str = field(default="none", kw_only=True)
    """Rule by which --lr, which is for --base-batch, grows with the global batch (replicas x batch size x minibatches
    of each in a round) where that is k times as large: linear (times k), sqrt (times its root), or none.
    """
    base_batch: int = field(default=0, kw_only=True)
    """The global batch that --lr is for; --lr-scaling linear and sqrt need it."""
