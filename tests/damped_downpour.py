"""A strategy that stands outside the package, as a user writes one: Downpour whose steps are damped."""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.core.consistency import Action, Key, Policy, Verdict
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.strategies import Downpour


class Damped(Policy):
    """Every push is applied at once, at a part of the learning rate."""

    def __init__(self, damping: float) -> None:
        super().__init__()
        self._damping = damping

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Apply it."""
        return Verdict(Action.APPLY, "it is damped", self._damping)


@dataclass(frozen=True)
class DampedDownpour(Downpour):
    """Downpour whose updates are made at a part of the learning rate."""

    damping: float = 0.5
    """The part of the learning rate at which a push is applied."""

    def check(self, settings: Settings) -> None:
        """As Downpour's, and a part is no more than the whole."""
        super().check(settings)
        if not 0 <= self.damping <= 1:
            raise UsageError(f"--damping {self.damping}: is a part of the learning rate, from 0 to 1")

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Damped."""
        return Damped(self.damping)


@dataclass(frozen=True)
class Bare(Downpour):
    """One with a field that nobody could leave off."""

    depth: int = None  # type: ignore[assignment]  # taken away below
    """Of nothing."""


del Bare.__dataclass_fields__["depth"].default
Bare.__dataclass_fields__["depth"].default = __import__("dataclasses").MISSING


@dataclass(frozen=True)
class Taken(Downpour):
    """One whose option has the name of what others ask of a strategy."""

    host_replicas: int = 3  # type: ignore[misc]  # that is what is wrong with it
    """Of nothing."""


NO_CLASS = 3
