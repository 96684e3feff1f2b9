"""Options of the commands `cost`, `split` and `plan`, which need no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distbelief.core.optimizer import Optimizer, optim
from distbelief.errors import UsageError
from distbelief.job import OnDevice
from distbelief.split.options import SplitSteps
from distbelief.transport.cluster_model import NetworkModel

MOST_REPLICAS = 256
"""Most replicas that a plan considers, so that planning takes seconds."""
MOST_BATCH = 1 << 20
MOST_AMOUNT = 1e15
"""Most seconds, bytes, watts or money: a budget is written with 18 digits before the point at most."""


def check_amounts(batch_size: int, epochs: int, amounts: Mapping[str, float | None]) -> None:
    """Refuse amounts out of range."""
    for name, value in (("batch-size", batch_size), ("epochs", epochs)):
        if not 1 <= value <= MOST_BATCH:
            raise UsageError(f"--{name} {value}: must be from 1 to {MOST_BATCH}")
    for name, amount in amounts.items():
        if amount is not None and not 0 < amount <= MOST_AMOUNT:
            raise UsageError(f"--{name} {amount:g}: must be more than 0, and at most {MOST_AMOUNT:g}")


@dataclass(frozen=True)
class CostRequest(OnDevice):
    """Minibatches and epochs whose cost is measured, and the power and price to charge."""

    batch_size: int = 64
    """Samples in a minibatch."""
    epochs: int = 1
    """Passes over the training set."""
    watts: float | None = None
    """Power of the machine while it trains, for the energy."""
    price_per_hour: float | None = None
    """Price of the machine in any currency, for the price of the training."""


@dataclass(frozen=True)
class SplitRequest(SplitSteps, OnDevice):
    """Steps of a split model to measure."""

    seconds: float = 10.0
    """Limit of the measurement."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Training to plan, its machines, and limits of the measurement."""

    machines: str = ""
    """Hosts and their cores, such as "4x8"; "" means this machine, or for scaling as many hosts as it needs."""
    network: NetworkModel = field(default_factory=NetworkModel)
    topology: str = ""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Replicas with the factor by which their steps take longer."""
    strategies: Sequence[str] = ()
    """Strategies to choose from; all planned ones by default."""
    batch_size: int = 64
    optimizer: Optimizer = field(default_factory=lambda: optim("sgd"))
    max_memory: float | None = None
    seconds: float = 30.0
    """Time limit of all runs together; scaling takes as long again to measure splits."""
    data_dir: str | None = None
