"""Options of strategies whose replicas add up their gradients among themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from distbelief.core.settings import Holder, Settings, StrategyOptions, at_least, option
from distbelief.errors import UsageError, unknown

GUESTS = 64
"""Limit of guests that may join one job: each sends into a window of its own in the memory of the others."""
CHOICES = {"buffers": ("broadcast", "local"), "on_death": ("regroup", "stop")}


@dataclass(frozen=True)
class Reducing(StrategyOptions):
    """Options of how replicas add up their gradients."""

    held_by: ClassVar[Holder] = Holder.REPLICAS
    one_moment: ClassVar[bool] = True

    accumulate: int = field(default=1, kw_only=True)
    """Minibatches whose gradients each replica accumulates for a round, where a larger one does not fit."""
    algorithm: str = field(default="auto", kw_only=True)
    """Algorithm that adds up gradients over links: ring, butterfly, halving-doubling, tree, naive, direct, hierarchical
    (hierarchical:tree: with tree between hosts); native (the carrier's own), or auto: that, and over TLS the cheapest
    by what is measured."""
    bucket_mb: float = field(default=25.0, kw_only=True)
    """Most megabytes of gradients that are added up at once, while the rest of the backward pass goes on."""
    buffers: str = field(default="broadcast", kw_only=True)
    """Batch-norm statistics: broadcast (all take those of the first replica at every step) or local (each keeps its
    own).
    """
    on_death: str = field(default="regroup", kw_only=True)
    """When a replica dies: regroup (the others go on, and its data is dealt again) or stop (the job ends at once, and
    --restarts is of the coordinator only)."""
    per_host: int = field(default=0, kw_only=True)
    """Replicas on each host, in their order, for hierarchical, and for auto where it chooses (over TLS); 0 for all."""

    def check(self, settings: Settings) -> None:
        """Refuse what no job can have.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
        at_least(self, 1, ("accumulate",), {})
        at_least(self, 0, ("per_host",), {})
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
        return settings.replicas * settings.batch_size * self.accumulate


def reduction(settings: Settings) -> Reducing:
    """Return how the replicas of a job add up their gradients; the usual way where the strategy does not say."""
    return settings.strategy if isinstance(settings.strategy, Reducing) else Reducing()
