"""The promises of a fabric: one rank's side of what reduces the vectors of a group, round after round.

1. *It adds up.* When `reduce` has said True, every vector holds on every rank what the postcondition of its schedule
   says, of what the ranks held when they made it ready; all ranks have the same bits.
2. *It waits for nobody.* `ready` and `reduce` come back within a moment, whoever is late: who drives it carries links
   meanwhile.
3. *In any order.* Ranks make vectors ready when they like, and the vectors of a round in any order.
4. *It gives back.* After True nobody reads or writes what this rank brought, and what it found stays as it is until
   this rank has made all vectors ready again.
5. *It keeps to its place.* It writes to nothing but the vectors.
6. *It ends nothing that it was not told to end.* False says that a rank is gone; who drives may give up at any moment.

`distbelief.testing.check_fabric` holds a fabric to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distbelief.fabric.buckets import Bucket
from distbelief.schedules.allreduce import broadcast, by_host, schedule
from distbelief.schedules.schedule import Schedule

Told = Callable[[], bool]
"""Tells that something has arrived of which a waiting rank must know now."""


class Fabric(Protocol):
    """One rank's side; its vectors are the buckets of one flat vector, known by their number."""

    def ready(self, bucket: int) -> None:
        """Note that a bucket holds what this rank brings: once in each round."""

    def reduce(self) -> bool | None:
        """Go on with a round of which all vectors are ready: True when all is reduced, False where that cannot be.

        None says that others are waited for: it is to be asked again.
        """
        ...


def schedule_of(bucket: Bucket, algorithm: str, ranks: int, per_host: int) -> Schedule:
    """The schedule of a bucket; one that is not added up goes from the first rank to all."""
    if not bucket.adds:
        return broadcast(ranks, bucket.length)
    hosts = by_host(ranks, per_host) if algorithm.startswith("hierarchical") else ()
    return schedule(algorithm, ranks, bucket.length, hosts)
