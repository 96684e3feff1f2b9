"""The strategies on a parameter server, one for each answer to what may be stale: downpour, synchronous, softsync, bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from distbelief.core import roles
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.values import Checked, Given
from distbelief.strategies.base import Scaled


@dataclass(frozen=True)
class Served(Checked):
    """A strategy whose replicas train parameters that shards hold, under a coordinator."""

    served: ClassVar[bool] = True
    """Whether there are replicas, and shards that serve them."""

    replicas: int = 2
    """Copies of the model, each in its own process."""
    shards: int = 2
    """Server processes that share the parameters."""
    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """What the shards step with."""
    restarts: int = field(default=3, kw_only=True)
    """Times that each replica, shard or standby, or the coordinator, that died is started anew."""

    standby: int = field(default=0, kw_only=True)
    """1: every shard has a standby process that holds all it has acknowledged, and takes its place when it dies."""

    name: ClassVar[str]

    @property
    def consistency(self) -> str:
        """What may be stale (`core/consistency`); every strategy on a server is one answer to that."""
        return self.name

    def cast(self) -> tuple[str, ...]:
        """The roles of a job, beside the evaluator."""
        standbys = map(roles.standby, range(self.shards if self.standby else 0))
        return (*map(roles.replica, range(self.replicas)), roles.COORDINATOR, *map(roles.shard, range(self.shards)), *standbys)


@dataclass(frozen=True)
class Asynchronous(Served):
    """One whose replicas push and fetch each at a cadence of their own."""

    push_every: int = 1
    """Steps whose gradients are summed into one push (the paper's n_push)."""
    fetch_every: int = 1
    """Steps between fetches of the parameters (the paper's n_fetch)."""
    local_lr: float = 0.0
    """Step of the plain SGD that a replica takes by itself between fetches; 0 takes none."""
    prefetch: int = 0
    """1: the next fetch is in flight while a step computes and pushes are not waited for, for one more step of staleness."""
    warm_start_steps: int = 0
    """Steps that one replica takes alone before the others begin."""
    staleness_scaling: str = "none"
    """How the learning rate of a push falls with its staleness: none, inverse (divided by it) or exponential."""


@dataclass(frozen=True)
class Downpour(Asynchronous):
    """Replicas push gradients to server shards and fetch parameters from them, none waiting for another (Dean et al. 2012, section 4.1)."""

    name: ClassVar[str] = "downpour"

    read_in_place: bool = False
    """Compute on the shards' own memory, torn, and fetch nothing (one machine, shared memory)."""


@dataclass(frozen=True)
class Synchronous(Served, Scaled):
    """Rounds: every replica computes one minibatch, and the shards make one update with the gradient of their union (Chen et al. 2016)."""

    name: ClassVar[str] = "synchronous"

    push_every: int = 1
    """Minibatches whose gradients each replica accumulates for a round."""
    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""


@dataclass(frozen=True)
class Softsync(Asynchronous):
    """The shards make one update with the mean of every floor(replicas / n) pushes; the staleness is about n (Zhang et al. 2016)."""

    name: ClassVar[str] = "softsync"

    n: int = 1
    """One update for every floor(replicas / n) pushes: 1 is nearest to synchronous, as many as replicas is downpour."""


@dataclass(frozen=True)
class Bounded(Asynchronous):
    """Every push is applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest (Ho et al. 2013)."""

    name: ClassVar[str] = "bounded"

    staleness: int = 3
    """Clocks (pushes) that a step may begin ahead of the slowest replica's; 0 waits for all before every step."""
