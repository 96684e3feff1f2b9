"""Strategies: ways to train, one room for each. Machines and clients that several share are in `server`, `replica`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields

from distbelief import references
from distbelief.core.settings import Traits, know
from distbelief.errors import UsageError, unknown
from distbelief.strategies.allreduce import Allreduce
from distbelief.strategies.base import Strategy
from distbelief.strategies.parameter_server.options import Bounded, Downpour, Hogwild, Locking, Softsync, Synchronous
from distbelief.strategies.sandblaster.options import Sandblaster
from distbelief.strategies.single.options import Single

STRATEGIES: Mapping[str, type[Strategy]] = {
    kind.name: kind
    for kind in (Downpour, Synchronous, Softsync, Bounded, Sandblaster, Allreduce, Hogwild, Locking, Single)
}
for _name, _kind in STRATEGIES.items():
    know(_name, _kind)


def find(name: str) -> type[Strategy]:
    """Find a strategy: one of ours, or a user's `module:Class`, which may lie in the current folder.

    Raises:
        UsageError: there is none of that name, or the class is not a strategy.

    >>> find("downpour")
    <class 'distbelief.strategies.parameter_server.options.Downpour'>
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    references.check_no_path("strategy", name, "Class")
    if ":" not in name:
        raise unknown("strategy", name, [*STRATEGIES, "module:Class"])
    _, kind, error = references.find("strategy", name, "Class")
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise UsageError(f"{error}; name a class of it that is a distbelief.strategies.Strategy")
    if bare := [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]:
        raise UsageError(f"strategy {name!r}: its field {bare[0]!r} has no default; give it one")
    if clashing := [field.name for field in fields(kind) if field.init and hasattr(Traits, field.name)]:
        raise UsageError(f"strategy {name!r}: its field {clashing[0]!r} has the name of a trait; rename it")
    know(name, kind)
    return kind


def by_name(name: str) -> Strategy:
    """Return the strategy of that name, with its default options.

    >>> by_name("downpour")
    Downpour(replicas=2, restarts=3, shards=2, standby=0, ...)
    """
    return find(name)()


def check_findable(strategy: Strategy) -> None:
    """Refuse a strategy that other processes cannot import by its name."""
    kind = type(strategy)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__ or find(kind.name) is not kind:
        raise UsageError(
            f"strategy {kind.name!r} cannot be imported by other processes: put the class {kind.__name__} at the top "
            "of a module of its own"
        )


__all__ = [
    "STRATEGIES",
    "Allreduce",
    "Bounded",
    "Downpour",
    "Hogwild",
    "Locking",
    "Sandblaster",
    "Single",
    "Softsync",
    "Strategy",
    "Synchronous",
    "by_name",
    "check_findable",
    "find",
]
