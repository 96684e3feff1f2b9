"""Bounded: asynchronous, but nobody runs ahead of the slowest by more than a bound (stale synchronous parallel, Ho et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.strategy.served import Asynchronous


@dataclass(frozen=True)
class Bounded(Asynchronous):
    """Every push is applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest."""

    name: ClassVar[str] = "bounded"

    staleness: int = 3
    """Clocks (pushes) that a step may begin ahead of the slowest replica's; 0 waits for all before every step."""
