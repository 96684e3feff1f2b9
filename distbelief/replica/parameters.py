"""Versions of the parameters that a replica holds, and what these contain."""

from __future__ import annotations

from collections.abc import Iterable

from distbelief.core.conversations.pushing import Fetched
from distbelief.core.messages import Version


class Parameters:
    """The parameters at hand, and those that have arrived and are not in use yet.

    Args:
        shards: that hold any that move.

    >>> held = Parameters(["shard 0", "shard 1"])
    >>> held.arrive("shard 0", Fetched(0, 0, 16, Version(0, 4), floor=3)); held.land()
    >>> held.versions["shard 0"].updates, held.floor, held.newest, held.behind()
    (4, 0, 3, ['shard 1'])
    """

    def __init__(self, shards: Iterable[str]) -> None:
        self.versions = dict.fromkeys(shards, Version(0, 0))
        """Version of each shard, in use."""
        self.floor = 0
        """The tick below which they contain every push."""
        self._arrived = dict(self.versions)
        self._floors = dict.fromkeys(self.versions, 0)

    def arrive(self, shard: str, event: Fetched) -> None:
        """Parameters of a shard have arrived; those that do not move have no floor."""
        self._arrived[shard] = event.version
        if shard in self._floors:
            self._floors[shard] = event.floor

    def arrived(self, shard: str) -> Version:
        """The version of a shard that has arrived last."""
        return self._arrived[shard]

    def land(self) -> None:
        """Use what has arrived from now on."""
        self.versions, self.floor = dict(self._arrived), min(self._floors.values())

    @property
    def newest(self) -> int:
        """The highest floor of any shard."""
        return max(self._floors.values())

    def behind(self, tick: int = 0) -> list[str]:
        """The shards whose floor is lower than another's, or than a tick."""
        newest = max(self.newest, tick)
        return [shard for shard, floor in self._floors.items() if floor < newest]
