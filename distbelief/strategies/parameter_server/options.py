"""Strategies on a parameter server; they differ in what may be stale: downpour, synchronous, softsync, bounded."""

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
"""Most replicas that can share a shard's memory."""


@dataclass(frozen=True)
class ServedWithOptimizer(Splittable, Served):
    """A served strategy whose shards have an optimizer."""

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of the shards."""

    @classmethod
    def players(cls) -> Players:
        """Return the players of parameter servers."""
        from distbelief.strategies.parameter_server.players import PLAYERS

        return PLAYERS


@dataclass(frozen=True)
class Asynchronous(Pushing, ServedWithOptimizer):
    """A strategy whose replicas push and fetch when they like."""

    meaningless: ClassVar[Mapping[str, str]] = {"path": ""}

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Return why the shards' processes make the updates; "" where replicas can."""
        reasons = {
            f"strategy {self.name} is a user's, and may have its own slices": ":" in self.name,
            f"--transport {carrier} has no memory that replicas and shards share": carrier != "shared",
            "--standby 1 needs pushes, which the standby holds": settings.standby > 0,
            f"--partitions {self.partitions}: a split replica pushes in parts": self.partitions > 1,
            f"--replicas {self.replicas}: at most {SHARING} can share the memory of a shard": self.replicas > SHARING,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Downpour(Asynchronous):
    """Each replica pushes gradients to server shards and fetches parameters from them, without waiting for the others
    (Dean et al. 2012, section 4.1).
    """

    name: ClassVar[str] = "downpour"


@dataclass(frozen=True)
class Synchronous(Accruing, ServedWithOptimizer, Scaled):
    """Rounds: each replica computes one minibatch, and the shards make one update with the gradient of all (Chen et al.
    2016).
    """

    name: ClassVar[str] = "synchronous"
    one_moment: ClassVar[bool] = True

    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""
    quorum: float = field(default=0.0, kw_only=True)
    """Gradients that a round waits for, instead of --backup-workers. Below 1 it is a fraction of the members (0.75),
    and follows deaths; else a number; 0 waits for all."""

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        """Return whether replicas read the parameters in the shards' own memory, which nobody updates meanwhile.

        That is so where a round waits for all replicas. A user's strategy may have other players: it gets copies.
        """
        waits = not (self.backup_workers or self.quorum or self.standby)
        return waits and carrier == "shared" and self.partitions == 1 and ":" not in self.name

    def check(self, settings: Settings) -> None:
        """Refuse rounds that wait for no replica, or for more than there are."""
        at_least(self, 1, ("push_every",), {})
        at_least(self, 0, ("backup_workers", "quorum"), {})
        if self.backup_workers >= settings.replicas:
            raise UsageError(
                f"--backup-workers {self.backup_workers} of {settings.replicas} replicas: a round must wait for at "
                "least one of them"
            )
        if self.quorum and self.backup_workers:
            raise UsageError(
                f"--quorum {self.quorum:g} and --backup-workers {self.backup_workers} both set how many replicas a "
                "round waits for: leave one of them off"
            )
        if self.quorum > settings.replicas or (self.quorum > 1 and self.quorum % 1):
            raise UsageError(
                f"--quorum {self.quorum:g} of {settings.replicas} replicas: must be a fraction below 1, or a whole "
                "number of replicas"
            )

    def global_batch(self, settings: Settings) -> int:
        """Return the number of samples that a round waits for."""
        waited = quorum_of(self.quorum, settings.replicas) if self.quorum else settings.replicas - self.backup_workers
        return waited * self.pushing.global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> consistency.Policy:
        """Return the policy of rounds, which one shard rules."""
        return Rounds(settings, rules, self.backup_workers, self.quorum)


@dataclass(frozen=True)
class Softsync(Asynchronous):
    """The shards make one update with the mean of floor(replicas / n) pushes; the staleness is about n (Zhang et al.
    2016).
    """

    name: ClassVar[str] = "softsync"

    n: int = 1
    """One update for every floor(replicas / n) pushes; 1 is nearest to synchronous, as many as replicas is downpour."""

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Return why the shards' processes make the updates; "" where replicas can."""
        several = f"--n {self.n} of {self.replicas} replicas: the shards' processes make one update of several pushes"
        return several if self.replicas // self.n > 1 else super().served_because(settings, carrier)

    def check(self, settings: Settings) -> None:
        """Refuse updates of less than one push."""
        super().check(settings)
        at_least(self, 1, ("n",), {})
        if self.n > settings.replicas:
            raise UsageError(
                f"--n {self.n}: must be at most --replicas, which is {settings.replicas}; then each push is an update"
            )

    def global_batch(self, settings: Settings) -> int:
        """Return the number of samples in the pushes of an update."""
        return settings.replicas // self.n * super().global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> consistency.Policy:
        """Return the policy that gathers pushes."""
        return consistency.SoftsyncPolicy(self.n, self.staleness_scaling)


@dataclass(frozen=True)
class Bounded(Asynchronous):
    """Pushes are applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest (Ho et al.
    2013).
    """

    name: ClassVar[str] = "bounded"

    staleness: int = 3
    """Clocks (pushes) by which a replica may be ahead of the slowest as it begins a step; 0 waits for all each time."""

    def check(self, settings: Settings) -> None:
        """Refuse a negative staleness."""
        super().check(settings)
        at_least(self, 0, ("staleness",), {})

    def policy(self, settings: Settings, rules: bool) -> consistency.Policy:
        """Return the policy that holds the fetches of a replica that is too far ahead."""
        return consistency.BoundedPolicy(self.staleness, self.staleness_scaling)
