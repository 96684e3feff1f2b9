"""Versions of the parameters that a replica holds, and which pushes are in them."""

from __future__ import annotations

from collections.abc import Iterable

from distbelief.core.conversations.pushing import Fetched
from distbelief.core.messages import Version


# What has arrived and what is in use are kept apart, since a fetch may be in flight while a step computes: a push must
# name the version that its gradient was computed from, not one that arrived meanwhile.
class Parameters:
    """Versions in use, and versions that have arrived and are not in use yet.

    Args:
        shards: that hold any parameters that move.

    >>> held = Parameters(["shard 0", "shard 1"])
    >>> held.arrive("shard 0", Fetched(0, 0, 16, Version(0, 4), floor=3)); held.land()
    >>> held.versions["shard 0"].updates, held.floor, held.newest, held.behind()
    (4, 0, 3, ['shard 1'])
    """

    def __init__(self, shards: Iterable[str]) -> None:
        self.versions = dict.fromkeys(shards, Version(0, 0))
        """Version of each shard, in use."""
        self.floor = 0
        """Tick below which every push is in the parameters in use, at all shards."""
        self._arrived = dict(self.versions)
        self._floors = dict.fromkeys(self.versions, 0)

    def arrive(self, shard: str, event: Fetched) -> None:
        """Note parameters that have arrived from a shard; those that do not move have no floor."""
        self._arrived[shard] = event.version
        if shard in self._floors:
            self._floors[shard] = event.floor

    def arrived(self, shard: str) -> Version:
        """Return the version of a shard that has arrived last."""
        return self._arrived[shard]

    def land(self) -> None:
        """Use what has arrived from now on."""
        self.versions, self.floor = dict(self._arrived), min(self._floors.values())

    @property
    def newest(self) -> int:
        """Highest floor of any shard."""
        return max(self._floors.values())

    def behind(self, tick: int = 0) -> list[str]:
        """Return the shards whose floor is lower than another's, or than a tick."""
        newest = max(self.newest, tick)
        return [shard for shard, floor in self._floors.items() if floor < newest]
