"""Work units of an evaluation, dealt so that slow and dead replicas delay nobody, and that each counts once.

Each replica has a run of consecutive work units, the same in every evaluation, and is dealt them in order, some in
reserve. When its run is empty it takes half of the longest run that is left. Once all are dealt, idle replicas get
copies of work units that are not done: the first result counts. A dead replica's work units are dealt again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

RESERVE = 3
"""Most work units that a replica holds: one on its way to the shards, the current one, and the next. Near the end it is
fewer, so that no work unit lies in reserve while another replica is idle.
"""


class WorkUnits:
    """Dealer of work units 0 to `count - 1` of one evaluation.

    Args:
        count: number of work units.
        members: the replicas, always in the same order.
        copies: number of other replicas that may be dealt the same work unit.

    >>> work_units = WorkUnits(2, ["replica 0", "replica 1"], copies=1)
    >>> work_units.deal("replica 0"), work_units.deal("replica 1"), work_units.deal("replica 0")
    (0, 1, None)
    >>> work_units.done(0, "replica 0"), work_units.deal("replica 0")
    (True, 1)
    >>> work_units.done(1, "replica 0"), work_units.done(1, "replica 1")
    (True, False)
    """

    def __init__(self, count: int, members: Iterable[str], copies: int) -> None:
        self.left = count
        """Number of work units that are not done."""
        self.again = 0
        """Number of copies that were dealt."""
        self._copies, self._fresh_left = copies, count
        self._done = bytearray(count)
        members = list(members)
        edges = [count * i // max(len(members), 1) for i in range(len(members) + 1)]
        self._runs = {who: (edges[i], edges[i + 1]) for i, who in enumerate(members)}
        self._unheld: deque[int] = deque(range(0 if members else count))
        self._held: dict[str, list[int]] = {}
        self._holders: dict[int, list[str]] = {}
        self._open: deque[int] = deque()  # dealt, and may be copied

    def deal(self, who: str) -> int | None:
        """Return the next work unit for a replica; None where it has enough, or there is none."""
        held = self._held.setdefault(who, [])
        if len(held) > min(RESERVE - 1, self._fresh_left // len(self._held)):
            return None
        number = self._fresh(who)
        if number is None and not held:
            number = self._copy(who)
        if number is not None:
            held.append(number)
            self._holders.setdefault(number, []).append(who)
        return number

    def _fresh(self, who: str) -> int | None:
        """Return a work unit that nobody holds."""
        while self._unheld:
            if not self._done[number := self._unheld.popleft()]:
                return self._begin(number)
        first, stop = self._runs.get(who, (0, 0))
        if first == stop and self._runs:
            longest = max(self._runs, key=lambda other: self._runs[other][1] - self._runs[other][0])
            start, end = self._runs[longest]
            if start == end:
                self._runs.clear()
                return None
            first, stop = (start + end) // 2, end
            self._runs[longest] = start, first
        if first == stop:
            return None
        self._runs[who] = first + 1, stop
        return self._begin(first)

    def _begin(self, number: int) -> int:
        """Note that a work unit is dealt for the first time."""
        self._open.append(number)
        self._fresh_left -= 1
        return number

    def _copy(self, who: str) -> int | None:
        """Return a work unit that another replica holds, the one that was dealt first."""
        for _ in range(len(self._open)):
            number = self._open.popleft()
            holders = self._holders.get(number, [])
            if self._done[number] or len(holders) > self._copies:
                continue
            self._open.append(number)
            if who not in holders:
                self.again += 1
                return number
        return None

    def done(self, number: int, who: str) -> bool:
        """Note that a replica has done a work unit; return whether it is the first to do so."""
        if who in (holders := self._holders.get(number, [])):
            holders.remove(who)
            self._held[who].remove(number)
        if self._done[number]:
            return False
        self._done[number] = 1
        self.left -= 1
        return True

    def withdraw(self, number: int) -> list[str]:
        """Take a work unit that is done from its other holders; return these."""
        holders = self._holders.pop(number, [])
        for who in holders:
            self._held[who].remove(number)
        return holders

    def lost(self, who: str) -> int:
        """Take back the work units of a dead replica; return how many nobody else holds."""
        again = 0
        for number in self._held.pop(who, []):
            self._holders[number].remove(who)
            if not self._done[number] and not self._holders[number]:
                self._unheld.append(number)
                self._fresh_left += 1
                again += 1
            else:
                self._open.append(number)  # another replica may take the dead one's place
        if (run := self._runs.pop(who, None)) is not None:
            self._unheld.extend(range(*run))
        return again

    def held(self, who: str) -> list[int]:
        """Return the work units that a replica holds."""
        return self._held.get(who, [])
