"""Updates by turns: replicas update a mapping in the order of their numbers, round and round (Niu 2011, section 5).

A replica takes part from the beginning of a gradient until it waits for the coordinator, or dies: so long it holds a
lock of its own, which the kernel takes from the dead. Whoever waits passes over those who take no part. An update is
made under the lock of all, and whose turn it is is written under that lock only: so a turn is never of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distbelief.strategies.shared_memory.counts import Counts
from distbelief.strategies.shared_memory.locks import following, waits_for
from distbelief.transport.locks import Locks, try_until

ALL = 0
"""The lock of all; those of replicas stand behind it, by their numbers."""


class UpdateTurns:
    """The turns of one replica, which is a process; they are taken and given as the lock of all is.

    Args:
        locks: of the mapping's file.
        counts: gives the counts in the mapping, where it stands whose turn it is.
        index: of the replica.
        replicas: how many there are.
    """

    def __init__(self, locks: Locks, counts: Callable[[], Counts], index: int, replicas: int) -> None:
        self._locks, self._counts, self._index, self._replicas = locks, counts, index, replicas
        self._entered = self._waiting = False

    def enter(self) -> None:
        """Take part from now on."""
        if not self._entered:
            self._entered = self._locks.try_one(self._lock(self._index))

    def leave(self) -> None:
        """Be passed over from now on."""
        if self._entered:
            self._locks.give([self._lock(self._index)])
            self._entered = False

    def take(self, numbers: Sequence[int], interrupted: Callable[[], bool]) -> bool:
        """Take the lock of all when it is this one's turn; False where `interrupted` says that something has come.

        Raises:
            JobFailed: the lock was not to be had for `LOCK_SECONDS`.
        """
        self._waiting = True
        try:
            while try_until(self._may_have_turn, interrupted) and self._locks.take(numbers, interrupted):
                counts = self._counts()
                counts.turn = following(counts.turn, filter(self._is_there, range(self._replicas)))
                if counts.turn == self._index:
                    return True
                self._locks.give(numbers)
            return False
        finally:
            self._waiting = False

    def give(self, numbers: Sequence[int]) -> None:
        """Give the turn to the next, and the lock back."""
        self._counts().turn = (self._index + 1) % self._replicas
        self._locks.give(numbers)

    def waits(self) -> str:
        """For whose turn to end this waits, or for which lock; "" where for none."""
        if not self._waiting:
            return ""
        turn = self._counts().turn
        return self._locks.waits() or (waits_for(turn) if turn != self._index else "")

    def _may_have_turn(self) -> bool:
        """Return whether it is this one's turn, or no member's; that is certain only under the lock of all."""
        turn = self._counts().turn
        return turn == self._index or not self._is_there(turn)

    def _is_there(self, replica: int) -> bool:
        return replica == self._index or self._locks.is_held(self._lock(replica))

    @staticmethod
    def _lock(replica: int) -> int:
        return ALL + 1 + replica
