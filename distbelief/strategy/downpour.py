"""Downpour: asynchronous SGD on a sharded parameter server (Dean et al. 2012, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.settings import Optimizer
from distbelief.strategy.served import Served


@dataclass(frozen=True)
class Downpour(Served):
    """Replicas push gradients to server shards and fetch parameters from them, none waiting for another."""

    name: ClassVar[str] = "downpour"

    replicas: int = 2
    """Copies of the model, each in its own process."""
    shards: int = 2
    """Server processes that share the parameters."""
    optimizer: Optimizer = Optimizer()
    """What the shards step with."""
    push_every: int = 1
    """Steps whose gradients are summed into one push (the paper's n_push)."""
    fetch_every: int = 1
    """Steps between fetches of the parameters (the paper's n_fetch)."""
    local_lr: float = 0.0
    """Step of the plain SGD that a replica takes by itself between fetches; 0 takes none."""
    prefetch: int = 0
    """1: the next fetch is in flight while a step computes and pushes are not waited for, for one more step of staleness."""
    read_in_place: bool = False
    """Compute on the shards' own memory, torn, and fetch nothing (one machine, shared memory)."""
    warm_start_steps: int = 0
    """Steps that one replica takes alone before the others begin."""
    staleness_scaling: str = "none"
    """How the learning rate of a push falls with its staleness: none, inverse (divided by it) or exponential."""
