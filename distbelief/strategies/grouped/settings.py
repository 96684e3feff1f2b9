"""Options of strategies whose replicas add up gradients among themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from distbelief.core.settings import Holder, Settings, StrategyOptions, among, at_least, option
from distbelief.errors import UsageError

GUESTS = 64
"""Most guests of a job: each needs a window in the memory of every other member."""
CHOICES = {"buffers": ("broadcast", "local"), "on_death": ("regroup", "stop")}


@dataclass(frozen=True)
class Reducing(StrategyOptions):
    """Options of how gradients are added up."""

    held_by: ClassVar[Holder] = Holder.REPLICAS
    one_moment: ClassVar[bool] = True

    accumulate: int = field(default=1, kw_only=True)
    """Minibatches whose gradients each replica accumulates in a round; use it where a larger minibatch does not fit."""
    algorithm: str = field(default="auto", kw_only=True)
    """Algorithm that adds up gradients over links: ring, butterfly, halving-doubling, tree, naive, direct, hierarchical
    (or hierarchical:tree: tree between hosts), or native (the network library's). auto takes native, and over TLS the
    one that is cheapest by measurement."""
    bucket_mb: float = field(default=25.0, kw_only=True)
    """Most megabytes of gradients that are added up at once, while the backward pass goes on."""
    buffers: str = field(default="broadcast", kw_only=True)
    """Batch-norm statistics: broadcast (all replicas take those of the first at each step) or local (each keeps its
    own)."""
    on_death: str = field(default="regroup", kw_only=True)
    """When a replica dies: regroup (the others go on, and its data is dealt again) or stop (the job ends, and
    --restarts applies only to the coordinator)."""
    per_host: int = field(default=0, kw_only=True)
    """Replicas on each host, for hierarchical and for auto over TLS; 0 puts all on one host."""

    def check(self, settings: Settings) -> None:
        at_least(self, 1, ("accumulate",), {})
        at_least(self, 0, ("per_host",), {})
        for name, known in CHOICES.items():
            among(option(name), getattr(self, name), known)
        if not 0 < self.bucket_mb < float("inf"):
            raise UsageError(f"--bucket-mb {self.bucket_mb}: must be more than 0")

    @property
    def host_replicas(self) -> int:
        return self.per_host

    def global_batch(self, settings: Settings) -> int:
        return settings.replicas * settings.batch_size * self.accumulate


def reduction(settings: Settings) -> Reducing:
    """Return how a job's replicas add up gradients; the defaults where its strategy has no such options."""
    return settings.strategy if isinstance(settings.strategy, Reducing) else Reducing()
