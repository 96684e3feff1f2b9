"""Hogwild and locking: no server; replicas update one memory themselves, without locks or with them (Niu et al. 2011)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from distbelief.core import roles
from distbelief.core.mapping import RANGES
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.values import Checked, Given


@dataclass(frozen=True)
class Mapped(Checked):
    """A strategy whose replicas, processes of one machine, update one mapping of parameters and optimizer state in place."""

    served: ClassVar[bool] = True
    """Whether there are replicas, under a coordinator."""
    name: ClassVar[str]

    replicas: int = 2
    """Copies of the model, each in its own process; its parameters are the mapping itself."""
    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """What every replica steps the mapping with: sgd, momentum, nesterov or adagrad."""
    restarts: int = field(default=3, kw_only=True)
    """Times that each replica or the coordinator that died is started anew."""

    @property
    def consistency(self) -> str:
        """What may be stale, or torn."""
        return self.name

    def cast(self) -> tuple[str, ...]:
        """The roles of a job, beside the evaluator."""
        return (*map(roles.replica, range(self.replicas)), roles.COORDINATOR)


@dataclass(frozen=True)
class Hogwild(Mapped):
    """No locks: an update may overwrite part of another, and a gradient may be computed while parameters change."""

    name: ClassVar[str] = "hogwild"
    locks: ClassVar[str] = "none"
    shards: ClassVar[int] = 1


@dataclass(frozen=True)
class Locking(Mapped):
    """Locks around updates: none is lost, and each range's is whole; a gradient may still be computed while parameters change."""

    name: ClassVar[str] = "locking"

    locks: str = "global"
    """What an update locks: global (everything), shard (each range that it writes to) or none (nothing: as hogwild)."""
    shards: int = 0
    """With --locks shard, ranges of the parameters that have a lock of their own; 0: 8."""

    @property
    def implied(self) -> dict[str, int]:
        """What the settings call otherwise: the ranges of the mapping."""
        return {"shards": self.shards or (RANGES if self.locks == "shard" else 1)}
