"""Ways to train, one room for each. What replicas and coordinators of several rooms share is in `replica` and
`server`.
"""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.core.settings import know
from distbelief.errors import unknown
from distbelief.strategies.allreduce.options import Allreduce
from distbelief.strategies.base import Strategy
from distbelief.strategies.parameter_server.options import Bounded, Downpour, Softsync, Synchronous
from distbelief.strategies.sandblaster.options import Sandblaster
from distbelief.strategies.shared_memory.options import Hogwild, Locking
from distbelief.strategies.single.options import Single

STRATEGIES: Mapping[str, type[Strategy]] = {
    kind.name: kind
    for kind in (Downpour, Synchronous, Softsync, Bounded, Sandblaster, Allreduce, Hogwild, Locking, Single)
}
"""Every strategy, by name."""
for _name, _kind in STRATEGIES.items():
    know(_name, _kind.own)


def by_name(name: str) -> Strategy:
    """The strategy of that name, with its defaults.

    Raises:
        UsageError: there is none, with the nearest that there is.

    >>> by_name("downpour")
    Downpour(replicas=2, shards=2, optimizer=Optimizer(name='sgd', lr=0.1, options={}, decay_exempt=False),
             restarts=3, ...)
    """
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name]()


__all__ = [
    "STRATEGIES", "Allreduce", "Bounded", "Downpour", "Hogwild", "Locking", "Sandblaster", "Single", "Softsync",
    "Strategy", "Synchronous", "by_name",
]  # fmt: skip
