"""Symbolic execution: it follows each element through a schedule's steps, and owes nothing to how that was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from distbelief.errors import LocalProtocolError
from distbelief.schedules.schedule import Move, Postcondition, Schedule


class SymbolicSum(NamedTuple):
    """Sum of the elements that some ranks began with."""

    ranks: int
    """Ranks as bits."""
    expression: int
    """The number of the expression by which it was made, which a + b and b + a share: equal ones have the same bits."""


State = list[list[SymbolicSum]]
"""Sums that each rank holds between two edges of a schedule: a row for each rank."""


def execute(schedule: Schedule) -> Iterator[State]:
    """Yield the sums that ranks hold at the beginning, and after each step.

    Raises:
        LocalProtocolError: a move of elements that there are not, or to a rank that there is not; one that adds what is
            in the sum already; two that reach the same elements at one step, of which one is put there.

    >>> from distbelief.schedules.allreduce import schedule
    >>> [[bin(row[0].ranks) for row in state] for state in execute(schedule("tree", 2, 1))]
    [['0b1', '0b10'], ['0b11', '0b10'], ['0b11', '0b11']]
    """
    edges = schedule.edges
    if edges[-1] > schedule.length or edges[0] < 0:
        raise LocalProtocolError(f"{schedule.algorithm} moves elements {edges[0]} to {edges[-1]} of {schedule.length}")
    expressions: dict[tuple[int, int], int] = {}
    state: State = [[SymbolicSum(1 << rank, -1 - rank)] * (len(edges) - 1) for rank in range(schedule.ranks)]
    yield state
    for number, step in enumerate(schedule.steps):
        where = place(schedule, number)
        _check_places(where, step, schedule.ranks)
        before, state = state, list(state)
        for move in step:
            row = state[move.target]
            if row is before[move.target]:
                row = state[move.target] = list(row)
            for at in schedule.parts_of(move):
                sent, held = before[move.source][at], row[at]
                if not move.adds:
                    row[at] = sent
                elif sent.ranks & held.ranks:
                    raise LocalProtocolError(f"{where}: {move} adds {names(sent.ranks & held.ranks)} a second time")
                else:
                    pair = (min(sent.expression, held.expression), max(sent.expression, held.expression))
                    row[at] = SymbolicSum(sent.ranks | held.ranks, expressions.setdefault(pair, len(expressions)))
        yield state


def wanted_ranks(schedule: Schedule) -> int:
    """Return the ranks whose elements are in what all hold at the end, as bits."""
    return 1 if schedule.postcondition is Postcondition.FIRST else (1 << schedule.ranks) - 1


def place(schedule: Schedule, step: int) -> str:
    """Return a step of a schedule in words."""
    return f"{schedule.algorithm} of {schedule.length} elements on {schedule.ranks} ranks, step {step}"


def _check_places(where: str, step: Iterable[Move], ranks: int) -> None:
    coming: dict[int, list[Move]] = {}
    for move in step:
        here = 0 <= move.source < ranks and 0 <= move.target < ranks
        if move.source == move.target or not here or move.length < 1:
            raise LocalProtocolError(f"{where}: {move} is no move between two of {ranks} ranks")
        coming.setdefault(move.target, []).append(move)
    for moves in coming.values():
        for first, second in combinations(moves, 2) if not all(move.adds for move in moves) else ():
            if first.overlaps(second) and not (first.adds and second.adds):
                raise LocalProtocolError(f"{where}: {first} and {second} reach the same elements")


def names(bits: int) -> str:
    """Return ranks in words."""
    return ", ".join(f"rank {rank}" for rank in range(bits.bit_length()) if bits >> rank & 1)
