"""Ways to train: the options of each strategy, and the roles of its jobs. What those do is in `server` and `replica`."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.errors import unknown
from distbelief.strategy.allreduce import Allreduce
from distbelief.strategy.bounded import Bounded
from distbelief.strategy.downpour import Downpour
from distbelief.strategy.hogwild import Hogwild, Locking
from distbelief.strategy.sandblaster import Sandblaster
from distbelief.strategy.single import Single
from distbelief.strategy.softsync import Softsync
from distbelief.strategy.synchronous import Synchronous

Strategy = Downpour | Synchronous | Softsync | Bounded | Sandblaster | Allreduce | Hogwild | Locking | Single

STRATEGIES: Mapping[str, type[Strategy]] = {
    kind.name: kind for kind in (Downpour, Synchronous, Softsync, Bounded, Sandblaster, Allreduce, Hogwild, Locking, Single)
}
"""Every strategy, by name."""


def by_name(name: str) -> Strategy:
    """The strategy of that name, with its defaults.

    Raises:
        UsageError: there is none, with the nearest that there is.

    >>> by_name("downpour")
    Downpour(replicas=2, shards=2, optimizer=Optimizer(name='sgd', lr=0.1, options={}, decay_exempt=False), restarts=3, ...)
    """
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name]()


__all__ = [
    "STRATEGIES", "Allreduce", "Bounded", "Downpour", "Hogwild", "Locking", "Sandblaster", "Single", "Softsync", "Strategy", "Synchronous", "by_name",
]  # fmt: skip
