"""Options of `cost`, `split` and `plan`, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.job import OnDevice
from distbelief.split.options import SplitSteps

MOST_REPLICAS = 256
"""The most replicas that a plan looks at: it is to be there in seconds."""


@dataclass(frozen=True)
class CostRequest(OnDevice):
    """Minibatches and epochs whose cost is asked for, and what is charged for them."""

    batch_size: int = 64
    """Samples in a minibatch."""
    epochs: int = 1
    """Passes over the training set."""
    watts: float | None = None
    """Power of the machine while it trains: tells the energy."""
    price_per_hour: float | None = None
    """Price of the machine, in any currency: tells the price of the training."""


@dataclass(frozen=True)
class SplitRequest(SplitSteps, OnDevice):
    """Steps of a split model that are to be measured."""

    seconds: float = 10.0
    """For measured steps."""
