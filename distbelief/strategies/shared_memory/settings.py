"""The settings of hogwild and locking that are their own."""

from __future__ import annotations

from typing import ClassVar

from distbelief.core.settings import Holder, Settings, StrategySettings
from distbelief.strategies.shared_memory import mapping


class MappedSettings(StrategySettings, frozen=True, kw_only=True):
    """Settings of what an update of the memory locks."""

    held_by: ClassVar[Holder] = Holder.MEMORY
    deals_to_any: ClassVar[str] = "has replicas that are processes of one machine, with the same data: use downpour"

    locks: str = "none"
    """none, shard (each range that it writes to), global, or round-robin (global, and by turns)."""

    @property
    def by_turns(self) -> bool:
        """Return whether replicas update one after another, in a fixed order."""
        return self.locks == "round-robin"

    def check(self, settings: Settings) -> None:
        """Refuse what replicas cannot do by themselves, in one memory."""
        mapping.check(self.name, settings.optimizer, self.locks, settings.shards)
