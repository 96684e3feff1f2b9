"""Bounded: asynchronous, but nobody runs ahead of the slowest by more than a bound (stale synchronous parallel, Ho et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.settings import Optimizer
from distbelief.strategy.served import Served


@dataclass(frozen=True)
class Bounded(Served):
    """Every push is applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest."""

    name: ClassVar[str] = "bounded"

    replicas: int = 2
    """Copies of the model, each in its own process."""
    shards: int = 2
    """Server processes that share the parameters."""
    optimizer: Optimizer = Optimizer()
    """What the shards step with."""
    staleness: int = 3
    """Clocks (pushes) that a step may begin ahead of the slowest replica's; 0 waits for all before every step."""
    staleness_scaling: str = "none"
    """How the learning rate of a push falls with its staleness: none, inverse (divided by it) or exponential."""
    push_every: int = 1
    """Steps whose gradients are summed into one push."""
    fetch_every: int = 1
    """Steps between fetches of the parameters."""
    local_lr: float = 0.0
    """Step of the plain SGD that a replica takes by itself between fetches; 0 takes none."""
    prefetch: int = 0
    """1: the next fetch is in flight while a step computes and pushes are not waited for, for one more step of staleness."""
    warm_start_steps: int = 0
    """Steps that one replica takes alone before the others begin."""
