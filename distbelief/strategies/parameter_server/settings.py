"""The settings of the strategies on a parameter server that are their own; those of downpour are `Pushing`, as others
push and fetch too.
"""

from __future__ import annotations

from typing import ClassVar

from distbelief.core import consistency
from distbelief.core.consistency import Policy
from distbelief.core.rounds import Rounds, quorum_of
from distbelief.core.settings import Pushing, Settings, at_least, option
from distbelief.errors import UsageError


class SynchronousSettings(Pushing, frozen=True, kw_only=True):
    """Rounds: shards make one update from the gradients of all who take part."""

    rounds: ClassVar[bool] = True
    attendance: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    one_moment: ClassVar[bool] = True

    backup_workers: int = 0
    """Replicas whose gradients a round does not wait for."""
    quorum: float = 0.0
    """Members whose gradients a round waits for: below 1 a fraction of them, else their number; 0 for all but the
    backup workers.
    """

    @property
    def leaves_behind(self) -> bool:
        """Return whether a round does not wait for all."""
        return bool(self.backup_workers or self.quorum)

    def check(self, settings: Settings) -> None:
        """Check as others do, and that a round waits for somebody."""
        super().check(settings)
        at_least(self, 0, ("backup_workers",), {})
        if self.backup_workers >= settings.replicas:
            raise UsageError(
                f"--backup-workers {self.backup_workers} of {settings.replicas} replicas: at least one must be left "
                "that a round waits for"
            )
        at_least(self, 0, ("quorum",), {})
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

    def singular(self, settings: Settings) -> str:
        """A round that is made without a replica would leave it between two models' steps."""
        late = next((option(name) for name in ("backup_workers", "quorum") if getattr(self, name)), "")
        return late or super().singular(settings)

    def global_batch(self, settings: Settings) -> int:
        """Return what all are pushing for a round."""
        waited = quorum_of(self.quorum, settings.replicas) if self.quorum else settings.replicas - self.backup_workers
        return waited * super().global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Rounds, which one shard rules."""
        return Rounds(settings, rules, self.backup_workers, self.quorum)


class SoftsyncSettings(Pushing, frozen=True, kw_only=True):
    """One update from several pushes, whoever they are of."""

    attendance: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    n: int = 1
    """One update for every floor(members / n) pushes."""

    def check(self, settings: Settings) -> None:
        """Check as others do, and that an update is of a push at least."""
        super().check(settings)
        at_least(self, 1, ("n",), {})
        if self.n > settings.replicas:
            raise UsageError(
                f"--n {self.n}: must be at most --replicas, which is {settings.replicas}; with as many, every push is "
                "an update"
            )

    def singular(self, settings: Settings) -> str:
        """A push is acknowledged as one of the next update, whichever model that would step."""
        return "strategy softsync"

    def global_batch(self, settings: Settings) -> int:
        """Return what is in the pushes of an update."""
        return settings.replicas // self.n * super().global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Pushes are gathered."""
        return consistency.SoftsyncPolicy(self.n, self.staleness_scaling)


class BoundedSettings(Pushing, frozen=True, kw_only=True):
    """No replica is too far ahead of the slowest."""

    attendance: ClassVar[bool] = True

    staleness: int = 3
    """Clocks by which a step may begin ahead of the slowest."""

    @property
    def staleness_bound(self) -> float:
        """Bound on the staleness, as it was asked for."""
        return self.staleness

    def check(self, settings: Settings) -> None:
        """Check as others do, and that the bound is a number of clocks."""
        super().check(settings)
        at_least(self, 0, ("staleness",), {})

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Fetches of who is too far ahead are held."""
        return consistency.BoundedPolicy(self.staleness, self.staleness_scaling)
