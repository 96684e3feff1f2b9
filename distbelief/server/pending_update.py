"""An update that a shard has begun, and its messages to the standby and to replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distbelief.core.consistency import Key, PlannedUpdate
from distbelief.core.conversations import pushing
from distbelief.core.conversations.agreement import Squares
from distbelief.core.conversations.mirroring import Copied, CopyUse
from distbelief.core.effects import Effect, Send
from distbelief.core.ledger import PushTaken
from distbelief.core.messages import Version
from distbelief.server.mirror import Mirror
from distbelief.server.slice import Slice


class PendingUpdate(NamedTuple):
    """One update, with its held pushes."""

    due: PlannedUpdate
    factor: float
    """Factor of the learning rate."""
    pushes: list[tuple[Key, pushing.Push]]
    staleness: tuple[int, ...]

    def has(self, key: Key) -> bool:
        """Return whether a push is part of the update."""
        return any(key == known for known, _ in self.pushes)

    def mirrored(self, mirror: Mirror, held: Slice, floor: int, norms: Squares) -> list[Effect]:
        """Have the standby make the same update."""
        # The standby has gathered pushes already, and needs only the order to step. It has no held pushes: it gets
        # their sum, in one vector, and their keys.
        if not self.pushes:
            return mirror.tell(step=(self.due.samples, self.factor, self.due.weight))
        if mirror.place is None:
            return []
        keys = tuple(push_taken(key.who, push) for key, push in self.pushes)
        use, due, payload = CopyUse.SUM, self.due, held.sum()
        sums = Copied(
            0, 0, payload.nbytes, 0, 0, use, keys, self.staleness, due.samples, self.factor, due.weight, floor, norms
        )
        return mirror.copy(sums, payload)

    def acknowledged(self, version: Version) -> list[Effect]:
        """Acknowledge the pushes of the update."""
        return [acknowledgement(key.who, push, version) for key, push in self.pushes]


def mean_rate(pushes: Sequence[pushing.Push]) -> float:
    """Return the mean of the learning-rate factors of pushes, weighted by their samples."""
    if all(push.rate == 1.0 for push in pushes):
        return 1.0
    samples = sum(push.samples for push in pushes)
    return sum(push.rate * push.samples for push in pushes) / samples if samples else pushes[0].rate


def acknowledgement(who: str, push: pushing.Push, version: Version, dropped: bool = False) -> Send:
    """Make the acknowledgement of a push."""
    return Send(who, pushing.Pushed(push.slot, push.clock, version, dropped, push.incarnation))


def push_taken(who: str, push: pushing.Push) -> PushTaken:
    """Return a push in the form of the ledger."""
    return PushTaken(who, push.partition, push.incarnation, push.clock)
