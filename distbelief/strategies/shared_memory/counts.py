"""The counts in a mapping: a row for each replica, which it alone writes, and one more for what was done before.

So nothing is lost where many count at once, and what a replica has counted stays when it dies.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from distbelief.core import roles
from distbelief.core.records import Json

UPDATES, SAMPLES, PROCESS, STALENESS = 0, 1, 2, 3
"""Columns of a row: updates made, samples in them, the process, and the number of updates of each staleness."""
TURN = PROCESS
"""Column of whose turn it is, in the row of what was done before, which no process has."""
ROW = 64
"""Counts in a row; the last one is of all higher stalenesses."""


class Counts:
    """The rows, as one replica sees them.

    Args:
        memory: of `size_of(replicas)` whole numbers, whoever else sees it.
        replicas: how many there are.
        index: of this one.

    >>> memory = [0] * size_of(2)
    >>> one, other = Counts(memory, 2, 0), Counts(memory, 2, 1)
    >>> one.look(); other.look(); other.add(64); one.add(64); one.facts()
    {'updates': 2, 'samples': 128, 'staleness': {'0': 1, '1': 1}, 'taken': []}
    """

    def __init__(self, memory: MutableSequence[int] | memoryview, replicas: int, index: int) -> None:
        self._memory: MutableSequence[int] | memoryview = memory
        self._replicas, self._row = replicas, index * ROW
        self._turn = replicas * ROW + TURN
        self._seen = 0

    def begin(self, facts: Json) -> None:
        """Begin with what was done before."""
        memory, before = self._memory, self._replicas * ROW
        for at in range(size_of(self._replicas)):
            memory[at] = 0
        memory[before + UPDATES], memory[before + SAMPLES] = int(facts.get("updates", 0)), int(facts.get("samples", 0))
        for staleness, count in facts.get("staleness", {}).items():
            memory[before + min(STALENESS + int(staleness), ROW - 1)] += int(count)

    def sign(self, process: int) -> None:
        """Say which process this replica is."""
        self._memory[self._row + PROCESS] = process

    def look(self) -> None:
        """Note how many updates there are: a gradient is about to be computed."""
        self._seen = self.total(UPDATES)

    def add(self, samples: int) -> None:
        """An update with that gradient is made."""
        memory, row = self._memory, self._row
        memory[row + min(STALENESS + self.total(UPDATES) - self._seen, ROW - 1)] += 1
        memory[row + SAMPLES] += samples
        memory[row + UPDATES] += 1

    @property
    def turn(self) -> int:
        """Return whose turn it is, where replicas update by turns."""
        return int(self._memory[self._turn])

    @turn.setter
    def turn(self, replica: int) -> None:
        self._memory[self._turn] = replica

    def total(self, what: int) -> int:
        """The sum of one count over all rows."""
        return sum(self._memory[what::ROW])

    def facts(self) -> Json:
        """Return what was done, by all and before: updates, samples, and how many updates had each staleness."""
        staleness = {str(at - STALENESS): count for at in range(STALENESS, ROW) if (count := self.total(at))}
        return {"updates": self.total(UPDATES), "samples": self.total(SAMPLES), "staleness": staleness, "taken": []}

    def holder(self, process: int) -> str:
        """Return which replica a process is.

        >>> Counts([0] * size_of(1), 1, 0).holder(7)
        'process 7'
        """
        holders = [at for at in range(self._replicas) if self._memory[at * ROW + PROCESS] == process]
        return roles.replica(holders[0]) if holders else f"process {process}"


def size_of(replicas: int) -> int:
    """Return how many numbers the rows of so many replicas are."""
    return (replicas + 1) * ROW
