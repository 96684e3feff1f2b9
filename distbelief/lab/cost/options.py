"""Options of `cost` and `split`, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass


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
class SplitRequest:
    """Steps of a split model that are to be measured."""

    batch_size: int = 64
    """Samples in a minibatch."""
    schedule: str = ""
    """sequential, gpipe or 1f1b; sequential with one microbatch, else 1f1b, where none is named."""
    microbatches: int = 1
    """Parts of a minibatch that go through the partitions by themselves."""
    seconds: float = 10.0
    """For measured steps."""
    device: str = "cpu"
    """Where they are computed: cpu, cuda, cuda:1."""
