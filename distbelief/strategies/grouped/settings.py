"""The settings of all-reduce that are its own."""

from __future__ import annotations

from typing import ClassVar

from distbelief.core.settings import Holder, Settings, StrategySettings, at_least, fit, option
from distbelief.errors import UsageError, unknown

GUESTS = 64
"""Limit of guests that may join one job: each sends into a window of its own in the memory of the others."""
CHOICES = {"buffers": ("broadcast", "local"), "on_death": ("regroup", "stop")}


class AllreduceSettings(StrategySettings, frozen=True, kw_only=True):
    """Settings of how replicas add up their gradients."""

    held_by: ClassVar[Holder] = Holder.REPLICAS
    deals_to_any: ClassVar[str] = "deals the minibatches of a round to its whole group: use synchronous"

    accumulate: int = 1
    """Minibatches whose gradients each replica accumulates for a round."""
    algorithm: str = "auto"
    """Algorithm that adds up gradients: one of `schedules/allreduce`, native or auto."""
    bucket_mb: float = 25.0
    """Most megabytes of gradients that are added up at once."""
    buffers: str = "broadcast"
    """Buffers that a replica computes with: those of the first (broadcast), or its own (local)."""
    on_death: str = "regroup"
    """Reaction of a job to a replica's death: regroup or stop."""
    per_host: int = 0
    """Replicas that are on one host, in their order; 0 for all."""

    def check(self, settings: Settings) -> None:
        """Refuse what no job can have.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
        at_least(self, 1, ("accumulate",), {})
        at_least(self, 0, ("per_host",), {})
        fit(self, {})
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise unknown(option(name), value, known)
        if not 0 < self.bucket_mb < float("inf"):
            raise UsageError(f"--bucket-mb {self.bucket_mb}: must be more than 0")

    @property
    def host_replicas(self) -> int:
        """Replicas of a host, as they were asked for."""
        return self.per_host

    def global_batch(self, settings: Settings) -> int:
        """Return what all accumulate for a round."""
        return settings.replicas * settings.data.batch_size * self.accumulate


def reduction(settings: Settings) -> AllreduceSettings:
    """Return how the replicas of a job add up their gradients; the usual way where the strategy does not say."""
    return settings.strategy if isinstance(settings.strategy, AllreduceSettings) else AllreduceSettings()
