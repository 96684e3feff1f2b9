"""The partitions that a split replica's lead leads in a job without a server, and what they have said."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from distbelief.core.conversations import grouping
from distbelief.core.effects import Arrival, Send
from distbelief.core.messages import Address, Message
from distbelief.replica.siblings import Siblings

Said = TypeVar("Said", bound=Message)
HEARD = (
    grouping.PartSummed,
    grouping.PartSquares,
    grouping.RoundsMade,
    grouping.Halted,
    grouping.Kept,
    grouping.PartValues,
)
"""Messages by which followers answer their lead."""


class Followers:
    """Those that one partition leads: none where it follows, or is a whole replica.

    Args:
        siblings: of the partition.
        collect: takes what they hold of the flat vector, from a byte of it on.
    """

    def __init__(self, siblings: Siblings, collect: Callable[[int, bytes], None]) -> None:
        self._siblings, self.collect = siblings, collect
        self._said: dict[tuple[str, type[Message]], Message] = {}

    def enter(self, enter: grouping.Enter) -> grouping.Enter:
        """Return what the lead enters the job with, for all."""
        joined = self._siblings.joined
        entered = [entry for role in self._siblings.followers if isinstance(entry := joined[role], grouping.Enter)]
        parts = tuple(grouping.PartPlace(Address(entry.address, entry.incarnation), entry.store) for entry in entered)
        return replace(enter, digest=" ".join([enter.digest, *(entry.digest for entry in entered)]), parts=parts)

    def assemble(self, assemble: grouping.Assemble) -> list[Send]:
        """Have each form a group with the same partitions of the other replicas."""
        return [
            Send(role, replace(assemble, members=grouping.column(assemble.members, partition)))
            for partition, role in enumerate(self._siblings.followers, 1)
        ]

    def take(self, arrival: Arrival) -> bool:
        """Note what one has said; whether it is that."""
        event = arrival.event
        if arrival.sender not in self._siblings.followers or not isinstance(event, HEARD):
            return False
        if isinstance(event, grouping.PartValues):
            self.collect(event.start, event.data)
        self._said[arrival.sender, type(event)] = event
        return True

    def missing(self, kind: type[Said], fits: Callable[[Said], bool]) -> list[str]:
        """Those of which the last word of a kind is not the one that is waited for."""
        last = [(role, self._said.get((role, kind))) for role in self._siblings.followers]
        return [role for role, word in last if not (isinstance(word, kind) and fits(word))]

    def said(self, kind: type[Said]) -> list[Said]:
        """The last word of a kind, of each that has said one; it is not said again."""
        words = [self._said.pop((role, kind), None) for role in self._siblings.followers]
        return [word for word in words if isinstance(word, kind)]

    def forget(self) -> None:
        """Forget what they have said."""
        self._said.clear()
