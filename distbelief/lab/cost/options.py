"""Options of `cost` and `split`, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.split.options import SplitSteps


@dataclass(frozen=True)
class CostRequest:
    """Minibatches and epochs whose cost is asked for, and what is charged for them."""

    batch_size: int = 64
    """Samples in a minibatch."""
    epochs: int = 1
    """Passes over the training set."""
    watts: float | None = None
    """What the machine takes while it trains: tells the energy."""
    price_per_hour: float | None = None
    """Of the machine, in any currency: tells the price."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""


@dataclass(frozen=True)
class SplitRequest(SplitSteps):
    """Steps of a split model that are to be measured."""

    seconds: float = 10.0
    """For measured steps."""
    device: str = "cpu"
    """Where they are computed: cpu, cuda, cuda:1."""
