"""Work units: who computes what of a batch, so that the slow and the dead hold nobody up, and each counts once.

Each replica begins with a run of consecutive work units of its own, the same in every evaluation, and is dealt them one
after another, some in reserve (so that it need not wait). Who has none left takes half of what is left of the longest
run. When all are dealt, what is not done is dealt once more, to whoever has nothing to do: the first result counts.
What a dead replica held is dealt again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

RESERVE = 3
"""Work units that a replica holds at most: one on its way to the shards, the one it computes, and the next. Fewer when
few
are left for each, so that nobody sits on one that another could begin.
"""


class WorkUnits:
    """Deals the work units 0 to `count - 1` of one evaluation.

    Args:
        count: of work units.
        members: the replicas, in an order that does not change.
        copies: how many more replicas may be dealt a work unit that another one holds.

    >>> work_units = WorkUnits(2, ["replica 0", "replica 1"], copies=1)
    >>> work_units.deal("replica 0"), work_units.deal("replica 1"), work_units.deal("replica 0")
    (0, 1, None)
    >>> work_units.done(0, "replica 0"), work_units.deal("replica 0"), work_units.done(1,
    ...     "replica 0"), work_units.done(1,
    ...     "replica 1")
    (True, 1, True, False)
    """

    def __init__(self, count: int, members: Iterable[str], copies: int) -> None:
        self.left = count
        """Number that is not done."""
        self.again = 0
        """Number that was dealt to one more."""
        self._copies, self._fresh_left = copies, count
        self._done = bytearray(count)
        members = list(members)
        edges = [count * i // max(len(members), 1) for i in range(len(members) + 1)]
        self._runs = {who: (edges[i], edges[i + 1]) for i, who in enumerate(members)}
        self._unheld: deque[int] = deque(range(0 if members else count))
        self._held: dict[str, list[int]] = {}
        self._holders: dict[int, list[str]] = {}
        self._open: deque[int] = deque()  # dealt, and may be dealt to one more

    def deal(self, who: str) -> int | None:
        """The next work unit for a replica that has room for one; None where there is none for it."""
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
        """One that nobody holds."""
        while self._unheld:
            if not self._done[number := self._unheld.popleft()]:
                return self._begin(number)
        first, stop = self._runs.get(who, (0, 0))
        if first == stop and self._runs:
            whose = max(self._runs, key=lambda other: self._runs[other][1] - self._runs[other][0])
            start, end = self._runs[whose]
            if start == end:
                self._runs.clear()
                return None
            first, stop = (start + end) // 2, end
            self._runs[whose] = start, first
        if first == stop:
            return None
        self._runs[who] = first + 1, stop
        return self._begin(first)

    def _begin(self, number: int) -> int:
        """One that nobody held is dealt."""
        self._open.append(number)
        self._fresh_left -= 1
        return number

    def _copy(self, who: str) -> int | None:
        """One that another replica holds, those dealt first before others."""
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
        """A replica has done a work unit; whether it is the first."""
        if who in (holders := self._holders.get(number, [])):
            holders.remove(who)
            self._held[who].remove(number)
        if self._done[number]:
            return False
        self._done[number] = 1
        self.left -= 1
        return True

    def withdraw(self, number: int) -> list[str]:
        """Take a work unit that is done from all who hold it; returns who they are."""
        holders = self._holders.pop(number, [])
        for who in holders:
            self._held[who].remove(number)
        return holders

    def lost(self, who: str) -> int:
        """A replica is gone; what nobody else holds is dealt again. Returns how many work units that is."""
        again = 0
        for number in self._held.pop(who, []):
            self._holders[number].remove(who)
            if not self._done[number] and not self._holders[number]:
                self._unheld.append(number)
                self._fresh_left += 1
                again += 1
            else:
                self._open.append(number)  # it may be dealt to one more in the dead one's place
        if (run := self._runs.pop(who, None)) is not None:
            self._unheld.extend(range(*run))
        return again

    def held(self, who: str) -> list[int]:
        """The work units that a replica holds."""
        return self._held.get(who, [])
