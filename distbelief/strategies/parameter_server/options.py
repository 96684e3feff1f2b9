"""The strategies on a parameter server, one for each answer to what may be stale: downpour, synchronous, softsync,
bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import Settings, StrategySettings
from distbelief.core.values import Given
from distbelief.strategies.base import Scaled, Served, Splittable
from distbelief.strategies.parameter_server.settings import BoundedSettings, SoftsyncSettings, SynchronousSettings

if TYPE_CHECKING:
    from distbelief.strategies.players import Players


SHARING = 240
"""Most replicas that update one memory."""


@dataclass(frozen=True)
class ServedWithOptimizer(Splittable, Served):
    """One whose shards step with an optimizer."""

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of the shards."""

    @classmethod
    def players(cls) -> Players:
        """Return who plays them."""
        from distbelief.strategies.parameter_server.players import PLAYERS

        return PLAYERS


@dataclass(frozen=True)
class Asynchronous(ServedWithOptimizer):
    """One whose replicas push and fetch each at a cadence of their own."""

    direct: ClassVar[bool] = True

    push_every: int = 1
    """Steps whose gradients are summed into one push (the paper's n_push)."""
    fetch_every: int = 1
    """Steps between fetches of the parameters (the paper's n_fetch)."""
    local_lr: float = 0.0
    """Step of the plain SGD that a replica takes by itself between fetches; 0 takes none."""
    prefetch: int = 0
    """1: the next fetch is in flight while a step computes and pushes are not waited for, for one more step of
    staleness.
    """
    warm_start_steps: int = 0
    """Steps that one replica takes alone before the others begin."""
    staleness_scaling: str = "none"
    """Scaling of a push's learning rate by its staleness: none, inverse (divided by it) or exponential."""

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Return what needs the shards' processes to make the updates; "" where nothing does."""
        reasons = {
            f"strategy {self.name} is written elsewhere, and may have slices of its own": ":" in self.name,
            f"--transport {carrier} has no memory that replicas and shards share": carrier != "shared",
            "--standby 1 has another process hold all that was pushed, which needs the pushes": settings.standby > 0,
            f"--partitions {self.partitions}: a replica that is split pushes in parts": self.partitions > 1,
            f"--replicas {self.replicas}: at most {SHARING} can share the memory of a shard": self.replicas > SHARING,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Downpour(Asynchronous):
    """Replicas push gradients to server shards and fetch parameters from them, none waiting for another (Dean et al.
    2012, section 4.1).
    """

    name: ClassVar[str] = "downpour"


@dataclass(frozen=True)
class Synchronous(ServedWithOptimizer, Scaled):
    """Rounds: every replica computes one minibatch, and the shards make one update with the gradient of their union
    (Chen et al. 2016).
    """

    name: ClassVar[str] = "synchronous"
    own: ClassVar[type[StrategySettings]] = SynchronousSettings

    push_every: int = 1
    """Minibatches whose gradients each replica accumulates for a round."""
    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""
    quorum: float = field(default=0.0, kw_only=True)
    """Gradients that a round waits for, in the place of --backup-workers: below 1 a fraction of the replicas that take
    part (0.75), which follows deaths; else their number; 0 waits for all."""

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """Return whether replicas find the parameters in the shards' own memory: nobody steps them while one computes,
        since a round waits for all. One that is written elsewhere may have others play them.
        """
        waits = not settings.strategy.leaves_behind and not settings.standby
        return waits and carrier == "shared" and self.partitions == 1 and ":" not in self.name


@dataclass(frozen=True)
class Softsync(Asynchronous):
    """The shards make one update with the mean of every floor(replicas / n) pushes; the staleness is about n (Zhang et
    al. 2016).
    """

    name: ClassVar[str] = "softsync"
    own: ClassVar[type[StrategySettings]] = SoftsyncSettings

    n: int = 1
    """One update for every floor(replicas / n) pushes: 1 is nearest to synchronous, as many as replicas is downpour."""

    def served_because(self, settings: Settings, carrier: str) -> str:
        """An update of several pushes is made by who has them all."""
        several = f"--n {self.n} of {self.replicas} replicas: the shards' processes make one update of several pushes"
        return several if self.replicas // self.n > 1 else super().served_because(settings, carrier)


@dataclass(frozen=True)
class Bounded(Asynchronous):
    """Every push is applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest (Ho et
    al. 2013).
    """

    name: ClassVar[str] = "bounded"
    own: ClassVar[type[StrategySettings]] = BoundedSettings

    staleness: int = 3
    """Clocks (pushes) that a step may begin ahead of the slowest replica's; 0 waits for all before every step."""
