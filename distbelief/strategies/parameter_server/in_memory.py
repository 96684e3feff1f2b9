"""Strategies whose replicas, processes of one machine, update one memory themselves: hogwild without locks (Niu et al.
2011), locking with those of the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distbelief.core.consistency import Policy, RoundRobin
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import Settings, at_least
from distbelief.core.values import Given
from distbelief.errors import UsageError, unknown
from distbelief.strategies.base import LocalMachine, Replicated, Strategy, Virtual, check_local_links
from distbelief.strategies.parameter_server.options import SHARING

if TYPE_CHECKING:
    from distbelief.strategies.players import Players

LOCKS = ("shard", "round-robin")
GONE = {
    "none": "updates without locks are those of strategy hogwild: train with that",
    "global": "one lock for all parameters is --locks shard --shards 1, the default: leave it off",
}
"""Choices that there were, and what there is instead."""
STEPPED = ("sgd", "momentum", "nesterov", "adagrad")
"""Optimizers that keep at most one number for each element: several would have to be of one moment."""


@dataclass(frozen=True)
class InMemory(Replicated):
    """A strategy whose replicas make the updates, where the parameters lie."""

    meaningless: ClassVar[Mapping[str, str]] = {
        "path": "its replicas make the updates in any case",
        "device": "it computes in memory that all replicas share, the host's: use cpu",
        "listen": "its replicas update the memory of one machine",
        "script": "a loop steps when it likes, and would see parameters change between any two of its lines: give it a "
        "task",
        **dict.fromkeys(
            ("data", "order"), "its replicas are processes of one machine, with the same data: use downpour"
        ),
        **dict.fromkeys(
            ("partitions", "split", "schedule", "microbatches", "chunks"),
            "replicas update one memory that holds the whole model, so that none is split",
        ),
    }

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """Theirs."""
        return True

    def check(self, settings: Settings) -> None:
        """Refuse more replicas than one memory can have."""
        if self.replicas > SHARING:
            raise UsageError(f"--replicas {self.replicas}: at most {SHARING} can share the memory of a shard")

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        """Refuse a network.

        Raises:
            UsageError: naming the option.
        """
        if machine.carrier != "shared":
            option = f"--listen {machine.listen}" if machine.listen else f"--transport {machine.transport}"
            raise UsageError(
                f"{option}: strategy {self.name} is of one machine, whose memory its replicas update; leave it off"
            )

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        """Refuse more hosts than one.

        Raises:
            UsageError: naming the hosts.
        """
        check_local_links(cluster)
        if cluster.host_replicas and cluster.host_replicas < settings.replicas:
            raise UsageError(
                f"hosts with {cluster.host_replicas} replicas: all {settings.replicas} update one memory, on one "
                "host; leave it off"
            )


@dataclass(frozen=True)
class Hogwild(InMemory):
    """No locks: an update may overwrite part of another, and a gradient may be computed while parameters change."""

    name: ClassVar[str] = "hogwild"
    meaningless: ClassVar[Mapping[str, str]] = {
        "fixed_point": "rounding a parameter would undo what others add to it at the same time; use downpour",
    }

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer with which every replica steps the parameters: sgd, momentum, nesterov or adagrad."""

    @classmethod
    def players(cls) -> Players:
        """Return who plays them."""
        from distbelief.strategies.parameter_server.hogwild import PLAYERS

        return PLAYERS

    def check(self, settings: Settings) -> None:
        """Refuse an optimizer whose steps replicas cannot make by themselves, in one memory."""
        super().check(settings)
        if self.optimizer.name not in STEPPED:
            raise UsageError(
                f"--optimizer {self.optimizer.name}: its step needs several numbers of one moment, which memory that "
                f"others write to does not have; strategy {self.name} steps with {', '.join(STEPPED)}, a server "
                "(downpour) with any"
            )
        if self.optimizer.options.get("dampening"):
            raise UsageError(
                "--optimizer-options dampening: torch leaves it out of the first step, and nobody here knows which is "
                "the first; leave it off"
            )


@dataclass(frozen=True)
class Locking(InMemory):
    """Updates under the shards' locks: none is lost, and every one is whole at each shard. Nor do the parameters change
    with which a gradient is computed.
    """

    name: ClassVar[str] = "locking"

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer with which a replica steps the parameters, under a shard's lock."""
    locks: str = "shard"
    """Locks of an update: shard (each shard's for its part), or round-robin (the one shard's, one replica after another
    in a fixed order)."""
    shards: int = 1
    """Shards of the parameters, each with a lock of its own; 1 is one lock for all."""

    @classmethod
    def players(cls) -> Players:
        """Return who plays them."""
        from distbelief.strategies.parameter_server.players import PLAYERS

        return PLAYERS

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Nothing: a replica has the shard's machine make its update, under the shard's lock."""
        return ""

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        """Refuse more hosts than one, and the speed of sums that nobody makes."""
        super().check_virtual(settings, cluster)
        Strategy.check_virtual(self, settings, cluster)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Every push is applied at once, or in its turn."""
        return RoundRobin(self.replicas) if self.locks == "round-robin" else Policy()

    def check(self, settings: Settings) -> None:
        """Refuse locks that are none."""
        super().check(settings)
        at_least(self, 1, ("shards",), {})
        if why := GONE.get(self.locks):
            raise UsageError(f"--locks {self.locks}: {why}")
        if self.locks not in LOCKS:
            raise unknown("--locks", self.locks, LOCKS)
        if self.locks == "round-robin" and self.shards != 1:
            raise UsageError(f"--shards {self.shards} with --locks round-robin: its order is of one lock; leave it off")
