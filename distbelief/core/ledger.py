"""The ledger: which pushes a shard has taken from whom, so that each is applied at most once.

The rules of the file:
1. A replica numbers its pushes 1, 2, 3, ... within one incarnation, each of its partitions does, and links keep their
order: a gap is a fault of the protocol. 2. A push that was taken before is acknowledged again and not applied. 3. A
push of an incarnation older than one already seen comes from the dead and is refused. 4. What a round drops is dropped
of all partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from distbelief.errors import RemoteProtocolError

SAMPLES_LIMIT = 1 << 40
"""Most samples that one message may claim: sums of what peers claim must stay numbers that can be sent."""


DROPPED = 4
"""Dropped pushes that are remembered of a replica: it has at most two that are not acknowledged."""


class Taking(StrEnum):
    """Decision on a push."""

    APPLY = "apply"
    ACKNOWLEDGE = "acknowledge"
    REFUSE = "refuse"


class Judgement(NamedTuple):
    """Decision on a push, and the sentence that says why."""

    taking: Taking
    reason: str


APPLY = Judgement(Taking.APPLY, "the next push of this replica")


class PushTaken(NamedTuple):
    """The last push that was taken of a partition of a replica, 0 where a replica is whole."""

    who: str
    partition: int
    incarnation: int
    clock: int


class Ledger:
    """The last clock taken of each partition of each replica's newest incarnation."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, int], tuple[int, int]] = {}
        self._dropped: dict[str, deque[tuple[int, int]]] = {}

    def taken(self) -> tuple[PushTaken, ...]:
        """All that it has taken, in few words."""
        return tuple(PushTaken(*key, *last) for key, last in self._clocks.items())

    def has(self, who: str, partition: int, incarnation: int, clock: int) -> bool:
        """Return whether a push, or a later one of its partition, was taken."""
        return self._clocks.get((who, partition), (-1, 0)) >= (incarnation, clock)

    def restore(self, taken: Iterable[PushTaken]) -> None:
        """Have taken this, and nothing else."""
        self._clocks = {(push.who, push.partition): (push.incarnation, push.clock) for push in taken}

    def note(self, push: PushTaken) -> None:
        """A push was taken elsewhere; the last of an incarnation may be told of after the first of the next."""
        key, last = (push.who, push.partition), (push.incarnation, push.clock)
        self._clocks[key] = max(self._clocks.get(key, (0, 0)), last)

    def drop(self, who: str, incarnation: int, clock: int) -> None:
        """A push that was taken is not applied, of no partition: should it come again, its replica is told so again."""
        self._dropped.setdefault(who, deque(maxlen=DROPPED)).append((incarnation, clock))

    def dropped(self, who: str, incarnation: int, clock: int) -> bool:
        """Return whether a push was taken, and not applied."""
        return (incarnation, clock) in self._dropped.get(who, ())

    def resume(self, who: str, partition: int, incarnation: int, clock: int) -> int:
        """A replica says that its pushes up to `clock` were taken before, by a shard that died; returns how many of
        them are not known here.

        Raises:
            RemoteProtocolError: a number that no clock has.

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
        """Decide on a push and, where it is to be applied, note it.

        Raises:
            RemoteProtocolError: a push is missing before this one.
        """
        key = who, partition
        # A clock alone decides, since links keep their order: the next number is new, a lower one was applied and only
        # its acknowledgement was lost, a higher one can only come where a message is missing. A new life counts from 1
        # again.
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
