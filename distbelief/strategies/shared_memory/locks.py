"""Locks of a simulated mapping: who has each, and who waits for it, first come, first served."""

from __future__ import annotations

from collections import deque


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

    def bury(self, role: str) -> list[str]:
        """Whoever dies gives back all that he has, and waits for nothing any more; returns who has something now and
        had to wait.
        """
        return [now for number, queue in self._queues.items() if role in queue and (now := self.give(role, number))]

    def holder(self, number: int) -> str:
        """Who has a lock; "" for nobody."""
        return next(iter(self._queues.get(number, ())), "")
