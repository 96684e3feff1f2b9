"""Strategies on a parameter server, by what may be stale: downpour, synchronous, softsync, bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from distbelief.core import consistency
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.rounds import Rounds, quorum_of
from distbelief.core.settings import Accruing, Pushing, Settings, at_least
from distbelief.core.values import Given
from distbelief.errors import UsageError
from distbelief.strategies.base import Scaled, Served, Splittable

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
class Asynchronous(Pushing, ServedWithOptimizer):
    """One whose replicas push and fetch each at a cadence of their own."""

    meaningless: ClassVar[Mapping[str, str]] = {"path": ""}

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
class Synchronous(Accruing, ServedWithOptimizer, Scaled):
    """Rounds: every replica computes one minibatch, and the shards make one update with the gradient of their union
    (Chen et al. 2016).
    """

    name: ClassVar[str] = "synchronous"
    one_moment: ClassVar[bool] = True

    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""
    quorum: float = field(default=0.0, kw_only=True)
    """Gradients that a round waits for, in the place of --backup-workers: below 1 a fraction of the replicas that take
    part (0.75), which follows deaths; else their number; 0 waits for all."""

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """Return whether replicas find the parameters in the shards' own memory: nobody steps them while one computes,
        since a round waits for all. One that is written elsewhere may have others play them.
        """
        waits = not (self.backup_workers or self.quorum or self.standby)
        return waits and carrier == "shared" and self.partitions == 1 and ":" not in self.name

    def check(self, settings: Settings) -> None:
        """Check that a round waits for somebody."""
        at_least(self, 1, ("push_every",), {})
        at_least(self, 0, ("backup_workers", "quorum"), {})
        if self.backup_workers >= settings.replicas:
            raise UsageError(
                f"--backup-workers {self.backup_workers} of {settings.replicas} replicas: at least one must be left "
                "that a round waits for"
            )
        if self.quorum and self.backup_workers:
            raise UsageError(
                f"--quorum {self.quorum:g} and --backup-workers {self.backup_workers} both say whom a round waits for: "
                "leave one of them off"
            )
        if self.quorum > settings.replicas or (self.quorum > 1 and self.quorum % 1):
            raise UsageError(
                f"--quorum {self.quorum:g} of {settings.replicas} replicas: is a fraction of the members below 1, or "
                "their number"
            )

    def global_batch(self, settings: Settings) -> int:
        """Return what all are pushing for a round."""
        waited = quorum_of(self.quorum, settings.replicas) if self.quorum else settings.replicas - self.backup_workers
        return waited * self.pushing.global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> consistency.Policy:
        """Rounds, which one shard rules."""
        return Rounds(settings, rules, self.backup_workers, self.quorum)


@dataclass(frozen=True)
class Softsync(Asynchronous):
    """The shards make one update with the mean of every floor(replicas / n) pushes; the staleness is about n (Zhang et
    al. 2016).
    """

    name: ClassVar[str] = "softsync"

    n: int = 1
    """One update for every floor(replicas / n) pushes: 1 is nearest to synchronous, as many as replicas is downpour."""

    def served_because(self, settings: Settings, carrier: str) -> str:
        """An update of several pushes is made by who has them all."""
        several = f"--n {self.n} of {self.replicas} replicas: the shards' processes make one update of several pushes"
        return several if self.replicas // self.n > 1 else super().served_because(settings, carrier)

    def check(self, settings: Settings) -> None:
        """Check as others do, and that an update is of a push at least."""
        super().check(settings)
        at_least(self, 1, ("n",), {})
        if self.n > settings.replicas:
            raise UsageError(
                f"--n {self.n}: must be at most --replicas, which is {settings.replicas}; with as many, every push is "
                "an update"
            )

    def global_batch(self, settings: Settings) -> int:
        """Return what is in the pushes of an update."""
        return settings.replicas // self.n * super().global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> consistency.Policy:
        """Pushes are gathered."""
        return consistency.SoftsyncPolicy(self.n, self.staleness_scaling)


@dataclass(frozen=True)
class Bounded(Asynchronous):
    """Every push is applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest (Ho et
    al. 2013).
    """

    name: ClassVar[str] = "bounded"

    staleness: int = 3
    """Clocks (pushes) that a step may begin ahead of the slowest replica's; 0 waits for all before every step."""

    def check(self, settings: Settings) -> None:
        """Check as others do, and that the bound is a number of clocks."""
        super().check(settings)
        at_least(self, 0, ("staleness",), {})

    def policy(self, settings: Settings, rules: bool) -> consistency.Policy:
        """Fetches of who is too far ahead are held."""
        return consistency.BoundedPolicy(self.staleness, self.staleness_scaling)
