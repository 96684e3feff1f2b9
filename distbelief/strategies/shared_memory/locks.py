"""Locks of a simulated mapping, first come, first served; and whose turn it is, where replicas take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from distbelief.core import roles


class Queues:
    """The locks of one mapping, by number.

    >>> locks = Queues()
    >>> locks.ask("replica 0", 3), locks.ask("replica 1", 3), locks.holder(3)
    (True, False, 'replica 0')
    >>> locks.give("replica 0", 3), locks.holder(3)
    ('replica 1', 'replica 1')
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[str]] = {}

    def ask(self, role: str, number: int) -> bool:
        """Stand in line for a lock; whether it is had at once."""
        queue = self._queues.setdefault(number, deque())
        queue.append(role)
        return queue[0] == role

    def give(self, role: str, number: int) -> str:
        """Give a lock back, or stop waiting for it; returns who has it now and had to wait, "" for nobody."""
        queue = self._queues[number]
        held = queue[0] == role
        queue.remove(role)
        return queue[0] if held and queue else ""

    def release_dead(self, role: str) -> list[str]:
        """Give back all that a dead role has, and its place in lines; return who has something now and had to wait."""
        return [now for number, queue in self._queues.items() if role in queue and (now := self.give(role, number))]

    def holder(self, number: int) -> str:
        """Return who has a lock; "" for nobody."""
        return next(iter(self._queues.get(number, ())), "")


class RoundRobin:
    """Turns of the replicas that compute, by their numbers, to update a mapping.

    >>> order = RoundRobin()
    >>> order.enter(0); order.enter(2)
    >>> order.ask(2), order.ask(0), order.give(0), order.turn
    (False, True, 2, 2)
    """

    def __init__(self) -> None:
        self.turn = 0
        self._present: set[int] = set()
        self._waiting: set[int] = set()

    def enter(self, replica: int) -> None:
        """One computes a gradient."""
        self._present.add(replica)

    def leave(self, replica: int) -> int | None:
        """Leave the turns, with nothing to compute or dead; return who has his turn now and waited for it, or None."""
        self._present.discard(replica)
        self._waiting.discard(replica)
        return self._pass_on()

    def ask(self, replica: int) -> bool:
        """Wait for a turn; whether it is had at once."""
        assert replica in self._present, f"{roles.replica(replica)} asks for a turn, and has computed no gradient"
        self._waiting.add(replica)
        return self._pass_on() == replica

    def has(self, replica: int) -> bool:
        """Return whether one has its turn, and has been told so."""
        return self.turn == replica and replica in self._present and replica not in self._waiting

    def give(self, replica: int) -> int | None:
        """The turn of one is over; returns as `leave`."""
        self.turn = replica + 1
        return self._pass_on()

    def _pass_on(self) -> int | None:
        if self._waiting:  # a turn stays with who has left till somebody waits for it
            self.turn = following(self.turn, self._present)
        if self.turn not in self._waiting:
            return None
        self._waiting.remove(self.turn)
        return self.turn


def following(turn: int, present: Iterable[int]) -> int:
    """Return whose turn it is, of those who compute: the first from `turn` on, and round again.

    >>> [following(turn, [0, 2]) for turn in (0, 1, 2, 3)]
    [0, 2, 2, 0]
    """
    return min(present, key=lambda replica: (replica < turn, replica))


def waits_for(turn: int) -> str:
    """Return what is said of who waits for its turn.

    >>> waits_for(2)
    'for its turn, which replica 2 has'
    """
    return f"for its turn, which {roles.replica(turn)} has"
