"""Ledger of a shard: the last push that it took of each replica, so that each push is applied at most once.

1. Each partition of a replica numbers its pushes 1, 2, 3, ... within an incarnation, and links keep their order: a gap
   is a fault of the protocol.
2. A push that was taken before is acknowledged again and not applied.
3. A push of an incarnation older than the newest known one is refused.
4. A push that a round drops is dropped of all partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from distbelief.errors import RemoteProtocolError

SAMPLES_LIMIT = 1 << 40
"""Most samples that one message may claim, so that sums of claims stay numbers that can be sent."""
DROPPED = 4
"""Dropped pushes kept of each replica: at most two are not acknowledged."""


class Taking(StrEnum):
    """Decision on a push."""

    APPLY = "apply"
    ACKNOWLEDGE = "acknowledge"
    REFUSE = "refuse"


class Judgement(NamedTuple):
    """Decision on a push, with its reason."""

    taking: Taking
    reason: str


APPLY = Judgement(Taking.APPLY, "the next push of this replica")


class PushTaken(NamedTuple):
    """Last push taken of a partition of a replica; partition 0 where the replica is whole."""

    who: str
    partition: int
    incarnation: int
    clock: int


class Ledger:
    """Last clock taken of each partition of each replica, in its newest incarnation."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, int], tuple[int, int]] = {}
        self._dropped: dict[str, deque[tuple[int, int]]] = {}

    def taken(self) -> tuple[PushTaken, ...]:
        """Return the last push of each partition, from which another ledger goes on."""
        return tuple(PushTaken(*key, *last) for key, last in self._clocks.items())

    def has(self, who: str, partition: int, incarnation: int, clock: int) -> bool:
        """Return whether a push, or a later one of its partition, was taken."""
        return self._clocks.get((who, partition), (-1, 0)) >= (incarnation, clock)

    def restore(self, pushes: Iterable[PushTaken]) -> None:
        """Take over the last pushes of another ledger."""
        self._clocks = {(push.who, push.partition): (push.incarnation, push.clock) for push in pushes}

    def note(self, push: PushTaken) -> None:
        """Note a push that was taken elsewhere; the last of an incarnation may come after the first of the next."""
        key, last = (push.who, push.partition), (push.incarnation, push.clock)
        self._clocks[key] = max(self._clocks.get(key, (0, 0)), last)

    def drop(self, who: str, incarnation: int, clock: int) -> None:
        """Note that a push was taken and dropped, in all partitions: if it comes again, the answer is the same."""
        self._dropped.setdefault(who, deque(maxlen=DROPPED)).append((incarnation, clock))

    def dropped(self, who: str, incarnation: int, clock: int) -> bool:
        """Return whether a push was taken and dropped."""
        return (incarnation, clock) in self._dropped.get(who, ())

    def resume(self, who: str, partition: int, incarnation: int, clock: int) -> int:
        """Note that a shard which died had taken a replica's pushes up to `clock`, as the replica says.

        Return the number of these pushes that are unknown here.

        >>> ledger = Ledger()
        >>> ledger.judge("replica 0", 0, 0, 1).taking.value, ledger.resume("replica 0", 0, 0, 3)
        ('apply', 2)
        >>> ledger.judge("replica 0", 0, 0, 4).taking.value, ledger.judge("replica 0", 1, 0, 1).taking.value
        ('apply', 'apply')
        """
        if not 0 <= clock <= SAMPLES_LIMIT:
            raise RemoteProtocolError(f"{who} says that {clock} of its pushes were taken")
        known, last = self._clocks.get((who, partition), (incarnation, 0))
        if incarnation < known:
            return 0
        last = last if incarnation == known else 0
        self._clocks[who, partition] = (incarnation, max(last, clock))
        return max(0, clock - last)

    def judge(self, who: str, partition: int, incarnation: int, clock: int) -> Judgement:
        """Decide on a push, and note it if it is to be applied.

        A push is refused if one before it is missing.
        """
        key = who, partition
        # The clock decides, since links keep their order. The next number is new; a lower one was applied, and only its
        # acknowledgement was lost; a higher one comes only if a message is missing. An incarnation counts from 1.
        known, last = self._clocks.get(key, (incarnation, 0))
        if incarnation < known:
            return Judgement(Taking.REFUSE, f"{who} incarnation {incarnation} was replaced by {known}")
        if incarnation > known:
            last = 0
        if clock == last + 1:
            self._clocks[key] = (incarnation, clock)
            return APPLY
        if clock <= last:
            return Judgement(Taking.ACKNOWLEDGE, f"push {clock} of {who} was applied before")
        raise RemoteProtocolError(f"{who} sent push {clock} after push {last}: a push in between is missing")
