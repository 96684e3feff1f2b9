"""Allreduce: no server; replicas add up their gradients among themselves, and each makes the same update (Goyal et al. 2017, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from distbelief.core import roles
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.values import Given
from distbelief.schedules.allreduce import PLACED, check_algorithm
from distbelief.strategies.base import Scaled


@dataclass(frozen=True)
class Allreduce(Scaled):
    """Rounds without a server: every replica holds the whole model, and all make one update with the gradient of the union of their minibatches."""

    name: ClassVar[str] = "allreduce"
    served: ClassVar[bool] = True
    """Whether there are replicas, under a coordinator."""
    consistency: ClassVar[str] = "allreduce"
    shards: ClassVar[int] = 1
    """What a checkpoint is cut into: every replica holds everything."""

    replicas: int = 2
    """Copies of the model, each in its own process."""
    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """What every replica steps with."""
    accumulate: int = field(default=1, kw_only=True)
    """Minibatches whose gradients each replica accumulates for a round, where a larger one does not fit."""
    algorithm: str = field(default="auto", kw_only=True)
    """How gradients are added up: ring, butterfly, halving-doubling, tree, naive, direct, hierarchical (hierarchical:tree: with tree between hosts),
    native (the carrier's own), or auto, the cheapest by what is measured."""
    bucket_mb: float = field(default=25.0, kw_only=True)
    """Most megabytes of gradients that are added up at once, while the rest of the backward pass goes on."""
    buffers: str = field(default="broadcast", kw_only=True)
    """Batch-norm statistics: broadcast (all take those of the first replica at every step) or local (each keeps its own)."""
    on_death: str = field(default="regroup", kw_only=True)
    """When a replica dies: regroup (the others go on, and its data is dealt again) or stop (the job ends at once)."""
    per_host: int = field(default=0, kw_only=True)
    """Replicas on each host, in their order, for hierarchical, and for auto where it chooses by links (not in shared memory); 0 for all."""
    restarts: int = field(default=3, kw_only=True)
    """Times that each replica or the coordinator that died is started anew; with --on-death stop, the coordinator only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_algorithm(self.algorithm, PLACED)

    @property
    def implied(self) -> dict[str, Any]:
        """The setting that has another name where there are pushes."""
        return {"push_every": self.accumulate}

    def cast(self) -> tuple[str, ...]:
        """The roles of a job."""
        return (*map(roles.replica, range(self.replicas)), roles.COORDINATOR)
