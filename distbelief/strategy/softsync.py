"""Softsync: one update for every few pushes, whoever's they are, and no barrier (Zhang et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.strategy.served import Asynchronous


@dataclass(frozen=True)
class Softsync(Asynchronous):
    """The shards make one update with the mean of every floor(replicas / n) pushes; the staleness is about n."""

    name: ClassVar[str] = "softsync"

    n: int = 1
    """One update for every floor(replicas / n) pushes: 1 is nearest to synchronous, as many as replicas is downpour."""
