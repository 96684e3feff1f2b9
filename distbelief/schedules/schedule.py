"""Schedules as data: who moves which elements to whom at which step, and whether they are added there or put there.

The rules of a schedule:

1. What leaves a rank at a step is as that rank had it at the end of the step before.
2. What reaches a rank at a step is taken in the order of the schedule, and is there at the end of the step.
3. A rank is at its next step when all that it was to receive has come; it waits for nobody else.

A schedule states its postcondition: what every rank holds at its end. A test executes it symbolically, and refuses one
that does not keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import msgspec


class Move(NamedTuple):
    """Elements [start, stop) go from one rank to another, which adds them to its own or puts them in their place."""

    source: int
    target: int
    start: int
    stop: int
    adds: bool

    @property
    def length(self) -> int:
        """Return how many elements."""
        return self.stop - self.start

    def overlaps(self, other: Move) -> bool:
        """Return whether some elements are moved by both."""
        return self.start < other.stop and other.start < self.stop


Step = tuple[Move, ...]


class RankStep(NamedTuple):
    """Moves of one rank at one step."""

    number: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]

    @property
    def swaps(self) -> bool:
        """Return whether elements that leave are among those that are received, so that a copy is needed."""
        return any(sent.overlaps(received) for sent in self.sends for received in self.receives)


class Postcondition(Enum):
    """Contents of every rank at the end."""

    SUM = "the sum of what all ranks held"
    FIRST = "what the first rank held"


class Schedule(msgspec.Struct, frozen=True, dict=True):
    r"""Moves of `length` elements between `ranks` ranks; steps in which nothing moves are left out.

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
    """The ranks of each host, where the algorithm knows of hosts."""
    postcondition: Postcondition = Postcondition.SUM

    @property
    def moves(self) -> Iterator[Move]:
        """All of them, in order."""
        return (move for step in self.steps for move in step)

    @cached_property
    def moved(self) -> int:
        """Elements that leave all ranks together."""
        return sum(move.length for move in self.moves)

    @cached_property
    def edges(self) -> list[int]:
        """Return where a move begins or ends, in order: the elements between two edges are moved together."""
        return sorted({0, self.length, *(edge for move in self.moves for edge in (move.start, move.stop))})

    def parts_of(self, move: Move) -> range:
        """The parts that a move has: part i lies between edges i and i + 1."""
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
        """Return what one rank does, in order; steps that do not concern it are left out."""
        return self._by_rank[rank]
