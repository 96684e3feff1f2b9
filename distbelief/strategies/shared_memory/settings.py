"""Settings of the updates that replicas of hogwild and locking make in one memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.settings import Holder, Settings, StrategyOptions
from distbelief.strategies.shared_memory import mapping


@dataclass(frozen=True)
class MemoryUpdates(StrategyOptions):
    """Locks of an update of the memory."""

    held_by: ClassVar[Holder] = Holder.MEMORY

    @property
    def locking(self) -> str:
        """Locks of an update: none, shard (each range that it writes to), global, or round-robin (global, by turns)."""
        return "none"

    @property
    def by_turns(self) -> bool:
        """Return whether replicas update one after another, in a fixed order."""
        return self.locking == "round-robin"

    def check(self, settings: Settings) -> None:
        """Refuse what replicas cannot do by themselves, in one memory."""
        mapping.check(self.name, settings.optimizer, self.locking, self.parts)
