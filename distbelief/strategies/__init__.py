"""Ways to train, one room for each. What replicas and coordinators of several rooms share is in `replica` and
`server`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import PurePosixPath
from types import ModuleType

from distbelief.core.settings import know
from distbelief.errors import UsageError, unknown
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


def find(name: str) -> type[Strategy]:
    """The strategy of that name: one of ours, or `module:Class`, a module as `import` would find it (from the current
    folder too) and in it a class of somebody's own.

    Raises:
        UsageError: there is none, with the nearest that there is, or what stands there is no strategy.

    >>> find("downpour")
    <class 'distbelief.strategies.parameter_server.options.Downpour'>
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    module_name, colon, attribute = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        named = ".".join(PurePosixPath(module_name).with_suffix("").parts)
        raise UsageError(
            f"strategy {name!r} is a path: write the module as Python imports it here, {named}:{attribute or 'Class'}"
        )
    if not colon:
        raise unknown("strategy", name, [*STRATEGIES, "module:Class"])
    kind = getattr(_module(name, module_name), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        found = "has no" if kind is None else f"has a {type(kind).__name__} by the name"
        raise UsageError(
            f"strategy {name!r}: module {module_name!r} {found} {attribute!r}; name a class of it that is a "
            "distbelief.strategies.Strategy"
        )
    if bare := [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]:
        raise UsageError(f"strategy {name!r}: its field {bare[0]!r} has no default; give it one")
    know(name, kind.own)
    return kind


def _module(name: str, module_name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        # a console script has its own folder there instead, unlike python -m
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"strategy {name!r}: importing {module_name!r} raised {type(error).__name__}: {error};"
            f" write module:Class so that `python -c 'import MODULE'` works in {os.getcwd()}"
        ) from error


def by_name(name: str) -> Strategy:
    """The strategy of that name, with its defaults.

    Raises:
        UsageError: as `find`.

    >>> by_name("downpour")
    Downpour(replicas=2, shards=2, restarts=3, standby=0, optimizer=Optimizer(name='sgd', lr=0.1, ...), ...)
    """
    return find(name)()


def check_findable(strategy: Strategy) -> None:
    """Refuse a strategy that no other process could find by its name.

    Raises:
        UsageError: saying why, and the remedy.
    """
    kind = type(strategy)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__ or find(kind.name) is not kind:
        raise UsageError(
            f"strategy {kind.name!r} cannot be imported by other processes: put the class {kind.__name__} at the top "
            "of a module of its own"
        )


__all__ = [
    "STRATEGIES", "Allreduce", "Bounded", "Downpour", "Hogwild", "Locking", "Sandblaster", "Single", "Softsync",
    "Strategy", "Synchronous", "by_name", "check_findable", "find",
]  # fmt: skip
