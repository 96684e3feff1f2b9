"""Hogwild and locking: replicas update one memory themselves, without locks or with them (Niu et al. 2011)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import Settings
from distbelief.core.values import Given
from distbelief.errors import UsageError
from distbelief.strategies.base import LocalMachine, Replicated, Virtual, check_local_links
from distbelief.strategies.shared_memory.mapping import RANGES
from distbelief.strategies.shared_memory.settings import MemoryUpdates

if TYPE_CHECKING:
    from distbelief.strategies.players import Players


@dataclass(frozen=True)
class Mapped(MemoryUpdates, Replicated):
    """A strategy whose replicas, processes of one machine, update one mapping of parameters and state in place."""

    meaningless: ClassVar[Mapping[str, str]] = {
        "fixed_point": "rounding a parameter would undo what others add to it at the same time; use downpour",
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

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer with which every replica steps the mapping: sgd, momentum, nesterov or adagrad."""

    @classmethod
    def players(cls) -> Players:
        """Return who plays them."""
        from distbelief.strategies.shared_memory.players import PLAYERS

        return PLAYERS

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """The mapping."""
        return True

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
class Hogwild(Mapped):
    """No locks: an update may overwrite part of another, and a gradient may be computed while parameters change."""

    name: ClassVar[str] = "hogwild"


@dataclass(frozen=True)
class Locking(Mapped):
    """Locks around updates: none is lost, and each range's is whole; a gradient may still be computed while parameters
    change.
    """

    name: ClassVar[str] = "locking"

    locks: str = "global"
    """Locks of an update: global (everything), shard (each range that it writes to), round-robin (everything, one
    replica after another in a fixed order) or none (nothing: as hogwild)."""
    shards: int = 0
    """With --locks shard, ranges of the parameters that have a lock of their own; 0: 8."""

    @property
    def locking(self) -> str:
        """Return as `locks`."""
        return self.locks

    @property
    def parts(self) -> int:
        """The ranges of the mapping."""
        return self.shards or (RANGES if self.locks == "shard" else 1)
