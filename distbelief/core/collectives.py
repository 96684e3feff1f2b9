"""Collectives as data: who sends which elements to whom at which step, and whether they are added there or put in the place of what is there.

The rules of a schedule:

1. What leaves a rank at a step is as that rank had it at the end of the step before.
2. What reaches a rank at a step is taken in the order of the schedule, and is there at the end of the step.
3. A rank is at its next step when all that it was to receive has come; it waits for nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec


class Transfer(NamedTuple):
    """Elements [start, stop) go from one rank to another, which adds them to its own or puts them there."""

    source: int
    target: int
    start: int
    stop: int
    adds: bool

    @property
    def length(self) -> int:
        """How many elements."""
        return self.stop - self.start


Step = tuple[Transfer, ...]


class Turn(NamedTuple):
    """What one rank does at one step."""

    step: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    @property
    def aside(self) -> bool:
        """Whether what comes must be kept aside until what goes has gone, because they are the same elements."""
        return any(one.start < other.stop and other.start < one.stop for one in self.sends for other in self.receives)


class Schedule(msgspec.Struct, frozen=True, dict=True):
    r"""An all-reduce of `length` elements among `ranks` ranks; steps in which nothing moves are left out.

    >>> from distbelief.core.algorithms import schedule
    >>> for step in schedule("ring", 2, 4).steps:
    ...     print(*step, sep="\n")
    Transfer(source=0, target=1, start=2, stop=4, adds=True)
    Transfer(source=1, target=0, start=0, stop=2, adds=True)
    Transfer(source=0, target=1, start=0, stop=2, adds=False)
    Transfer(source=1, target=0, start=2, stop=4, adds=False)
    """

    algorithm: str
    ranks: int
    length: int
    steps: tuple[Step, ...]
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, where the algorithm knows of hosts."""

    @property
    def transfers(self) -> Iterator[Transfer]:
        """All of them, in order."""
        return (transfer for step in self.steps for transfer in step)

    @cached_property
    def moved(self) -> int:
        """Elements that leave all ranks together."""
        return sum(transfer.length for transfer in self.transfers)

    def between_hosts(self, hosts: tuple[tuple[int, ...], ...]) -> int:
        """Elements that go from a rank of one host to a rank of another."""
        home = {rank: number for number, members in enumerate(hosts) for rank in members}
        return sum(t.length for t in self.transfers if home[t.source] != home[t.target])

    @cached_property
    def _turns(self) -> list[list[Turn]]:
        found: list[list[Turn]] = [[] for _ in range(self.ranks)]
        for number, step in enumerate(self.steps):
            sends: dict[int, list[Transfer]] = {}
            receives: dict[int, list[Transfer]] = {}
            for transfer in step:
                sends.setdefault(transfer.source, []).append(transfer)
                receives.setdefault(transfer.target, []).append(transfer)
            for rank in sorted(sends.keys() | receives.keys()):
                found[rank].append(Turn(number, tuple(sends.get(rank, ())), tuple(receives.get(rank, ()))))
        return found

    def turns(self, rank: int) -> list[Turn]:
        """What one rank does, in order; steps that do not concern it are left out."""
        return self._turns[rank]
