"""Partitions of split replicas, as the coordinator knows them: it tells those of one replica where the others are."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.conversations.partitioning import Meet
from distbelief.core.effects import Effect, Send
from distbelief.core.messages import Address


class PartitionRegistry:
    """The partitions of one job's replicas.

    Args:
        partitions: of each replica.

    >>> registry = PartitionRegistry(2)
    >>> registry.here("replica 0.1", Address("unix:@b", 0)), registry.here("replica 0.0", Address("unix:@a", 1))
    ([], [])
    >>> [sent.to for sent in registry.here("replica 0.1", Address("unix:@c", 1))]
    ['replica 0.0', 'replica 0.1']
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._places: dict[str, Address] = {}

    def here(self, role: str, place: Address) -> list[Effect]:
        """One is there, in some life; once all are there that share this life, they are told to meet."""
        if role in self._places and place.incarnation < self._places[role].incarnation:
            return []
        self._places[role] = place
        # partitions of one replica live and die together: one that was started anew waits for the next lives of the
        # others
        siblings = roles.partitions_of(role, self._partitions)
        places = tuple(self._places[sibling] for sibling in siblings if sibling in self._places)
        if len(places) < self._partitions or any(other.incarnation != place.incarnation for other in places):
            return []
        return [Send(sibling, Meet(places)) for sibling in siblings]
