"""Strategies whose replicas update the memory that they share, on one machine: hogwild without locks (Niu et al. 2011),
locking under the shards' locks.
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
    "none": "updates without locks are strategy hogwild: use that",
    "global": "one lock for all parameters is --locks shard --shards 1, the default: leave it off",
}
"""Values of earlier versions, and their replacement."""
STEPPED = ("sgd", "momentum", "nesterov", "adagrad")
"""Optimizers with at most one number of state for each element: several could be of different updates."""


@dataclass(frozen=True)
class InMemory(Replicated):
    """A strategy whose replicas update the parameters in place."""

    meaningless: ClassVar[Mapping[str, str]] = {
        "path": "its replicas always make the updates",
        "device": "its replicas share the host's memory: use cpu",
        "listen": "its replicas update the memory of one machine",
        "script": "between two lines of a script, other replicas could change its parameters: give it a task",
        **dict.fromkeys(
            ("data", "order"), "its replicas are processes of one machine, with the same data: use downpour"
        ),
        **dict.fromkeys(
            ("partitions", "split", "schedule", "microbatches", "chunks"),
            "replicas update one memory that holds the whole model, which cannot be split",
        ),
    }

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """Return True: the replicas update shared memory."""
        return True

    def check(self, settings: Settings) -> None:
        """Refuse more replicas than can share a memory."""
        if self.replicas > SHARING:
            raise UsageError(f"--replicas {self.replicas}: at most {SHARING} can share the memory of a shard")

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        """Refuse links over a network.

        Raises:
            UsageError: names the option.
        """
        if machine.carrier != "shared":
            option = f"--listen {machine.listen}" if machine.listen else f"--transport {machine.transport}"
            raise UsageError(f"{option}: the replicas of {self.name} update the memory of one machine: leave it off")

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        """Refuse several hosts.

        Raises:
            UsageError: names their size.
        """
        check_local_links(cluster)
        if cluster.host_replicas and cluster.host_replicas < settings.replicas:
            raise UsageError(
                f"hosts with {cluster.host_replicas} replicas: all {settings.replicas} replicas share memory, and must "
                "be on one host; leave it off"
            )


@dataclass(frozen=True)
class Hogwild(InMemory):
    """No locks: updates may overwrite parts of each other, and parameters may change while a gradient is computed."""

    name: ClassVar[str] = "hogwild"
    meaningless: ClassVar[Mapping[str, str]] = {
        "fixed_point": "rounding a parameter would undo what other replicas add at the same time: use downpour",
    }

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of every replica: sgd, momentum, nesterov or adagrad."""

    @classmethod
    def players(cls) -> Players:
        """Return the players of hogwild."""
        from distbelief.strategies.parameter_server.hogwild import PLAYERS

        return PLAYERS

    def check(self, settings: Settings) -> None:
        """Refuse an optimizer that replicas cannot step in shared memory."""
        super().check(settings)
        if self.optimizer.name not in STEPPED:
            raise UsageError(
                f"--optimizer {self.optimizer.name}: needs several numbers of the same moment, which shared memory "
                f"does not have; use {', '.join(STEPPED)}, or strategy downpour, which steps with any"
            )
        if self.optimizer.options.get("dampening"):
            raise UsageError(
                "--optimizer-options dampening: torch leaves it out of the first step, and no replica knows which step "
                "is the first: leave it off"
            )


@dataclass(frozen=True)
class Locking(InMemory):
    """Updates under the shards' locks: none is lost, each is whole at every shard, and parameters do not change while a
    gradient is computed.
    """

    name: ClassVar[str] = "locking"

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer with which a replica updates the parameters, under a shard's lock."""
    locks: str = "shard"
    """Locks of an update: shard (each shard's for its part), or round-robin (the lock of the one shard, which replicas
    take in a fixed order)."""
    shards: int = 1
    """Shards of the parameters, each with its lock; 1 is one lock for everything."""

    @classmethod
    def players(cls) -> Players:
        """Return the players of parameter servers."""
        from distbelief.strategies.parameter_server.players import PLAYERS

        return PLAYERS

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Return "": a replica makes its update with the shard's machine, under the shard's lock."""
        return ""

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        """Refuse several hosts, and the speed of sums: no gradients are summed."""
        super().check_virtual(settings, cluster)
        Strategy.check_virtual(self, settings, cluster)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Return the policy: apply every push at once, or in its turn."""
        return RoundRobin(self.replicas) if self.locks == "round-robin" else Policy()

    def check(self, settings: Settings) -> None:
        """Refuse locks that do not exist."""
        super().check(settings)
        at_least(self, 1, ("shards",), {})
        if why := GONE.get(self.locks):
            raise UsageError(f"--locks {self.locks}: {why}")
        if self.locks not in LOCKS:
            raise unknown("--locks", self.locks, LOCKS)
        if self.locks == "round-robin" and self.shards != 1:
            raise UsageError(f"--shards {self.shards}: --locks round-robin orders a single lock: leave it off")
