"""Schedules as data: elements that move from rank to rank at each step, and are added to others or replace them.

The rules of a schedule:

1. Elements leave a rank with the values that they had at the end of the step before.
2. Elements that arrive at a rank are added or stored in the order of the schedule, by the end of the step.
3. A rank continues with its next step once all its elements of this step have arrived; it waits for nothing else.

A schedule has a postcondition: what every rank holds at the end. A test executes schedules symbolically, and checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import msgspec


class Move(NamedTuple):
    """Elements [start, stop) that go from one rank to another, which adds them to its own or replaces its own."""

    source: int
    target: int
    start: int
    stop: int
    adds: bool

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def overlaps(self, other: Move) -> bool:
        """Return whether two moves have elements in common."""
        return self.start < other.stop and other.start < self.stop


Step = tuple[Move, ...]


class RankStep(NamedTuple):
    """The moves of one rank at one step."""

    number: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]

    @property
    def swaps(self) -> bool:
        """Return whether the same elements leave and arrive in this step, which needs a copy."""
        return any(sent.overlaps(received) for sent in self.sends for received in self.receives)


class Postcondition(Enum):
    """Contents of every rank at the end."""

    SUM = "the sum of what all ranks held"
    FIRST = "what the first rank held"


class Schedule(msgspec.Struct, frozen=True, dict=True):
    r"""Moves of `length` elements between `ranks` ranks; steps without moves are left out.

    >>> from distbelief.schedules.allreduce import schedule
    >>> for step in schedule("ring", 2, 4).steps:
    ...     print(*step, sep="\n")
    Move(source=0, target=1, start=2, stop=4, adds=True)
    Move(source=1, target=0, start=0, stop=2, adds=True)
    Move(source=0, target=1, start=0, stop=2, adds=False)
    Move(source=1, target=0, start=2, stop=4, adds=False)
    """

    algorithm: str
    ranks: int
    length: int
    steps: tuple[Step, ...]
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, if the algorithm uses hosts."""
    postcondition: Postcondition = Postcondition.SUM

    @property
    def moves(self) -> Iterator[Move]:
        """Return all moves, in order."""
        return (move for step in self.steps for move in step)

    @cached_property
    def moved(self) -> int:
        """Return the number of elements sent, over all ranks."""
        return sum(move.length for move in self.moves)

    @cached_property
    def edges(self) -> list[int]:
        """Return starts and ends of moves, in order; elements between two edges move together."""
        return sorted({0, self.length, *(edge for move in self.moves for edge in (move.start, move.stop))})

    def parts_of(self, move: Move) -> range:
        """Return the parts of a move; part i lies between edges i and i + 1."""
        return range(self._part[move.start], self._part[move.stop])

    @cached_property
    def _part(self) -> dict[int, int]:
        return {edge: number for number, edge in enumerate(self.edges)}

    @cached_property
    def _by_rank(self) -> list[tuple[RankStep, ...]]:
        steps_by_rank: list[list[RankStep]] = [[] for _ in range(self.ranks)]
        for number, step in enumerate(self.steps):
            sends: dict[int, list[Move]] = {}
            receives: dict[int, list[Move]] = {}
            for move in step:
                sends.setdefault(move.source, []).append(move)
                receives.setdefault(move.target, []).append(move)
            for rank in sorted(sends.keys() | receives.keys()):
                steps_by_rank[rank].append(RankStep(number, tuple(sends.get(rank, ())), tuple(receives.get(rank, ()))))
        return [tuple(steps) for steps in steps_by_rank]

    def steps_of(self, rank: int) -> tuple[RankStep, ...]:
        """Return the steps of one rank, in order, without those in which it has no move."""
        return self._by_rank[rank]
