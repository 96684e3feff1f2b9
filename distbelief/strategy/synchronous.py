"""Synchronous: all replicas make one update together, on the same shards (Chen et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.settings import Optimizer
from distbelief.strategy.served import Served


@dataclass(frozen=True)
class Synchronous(Served):
    """Rounds: every replica computes one minibatch, and the shards make one update with the gradient of their union."""

    name: ClassVar[str] = "synchronous"

    replicas: int = 2
    """Copies of the model, each in its own process; backup workers are among them."""
    shards: int = 2
    """Server processes that share the parameters."""
    optimizer: Optimizer = Optimizer()
    """What the shards step with."""
    push_every: int = 1
    """Minibatches that each replica computes for a round."""
    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""
