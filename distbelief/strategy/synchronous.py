"""Synchronous: all replicas make one update together, on the same shards (Chen et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.strategy.large import Scaled
from distbelief.strategy.served import Served


@dataclass(frozen=True)
class Synchronous(Served, Scaled):
    """Rounds: every replica computes one minibatch, and the shards make one update with the gradient of their union."""

    name: ClassVar[str] = "synchronous"

    push_every: int = 1
    """Minibatches whose gradients each replica accumulates for a round."""
    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""
