"""Proof that a schedule keeps its postcondition, for whatever the ranks hold."""

from __future__ import annotations

from distbelief.errors import LocalProtocolError
from distbelief.lab.draw.schedules import execute, names, place, wanted_ranks
from distbelief.schedules.schedule import Schedule


def prove(schedule: Schedule) -> None:
    """Prove that a schedule keeps its postcondition, for whatever the ranks hold.

    At its end every rank has, of each element, the sum over the ranks that the postcondition names, each counted once,
    and made by the same additions up to the order of their two operands: so that all have the same bits. Nothing is put
    anywhere but what is to be there at the end.

    Raises:
        LocalProtocolError: it does not; with the step and the move.

    >>> from distbelief.schedules.allreduce import schedule
    >>> prove(schedule("butterfly", 6, 10))
    """
    edges, wanted = schedule.edges, wanted_ranks(schedule)
    states = execute(schedule)
    state = next(states)
    for number, (step, after) in enumerate(zip(schedule.steps, states, strict=True)):
        for move in step:
            for at in schedule.parts_of(move) if not move.adds else ():
                if (sent := state[move.source][at].ranks) != wanted:
                    raise LocalProtocolError(f"{place(schedule, number)}: {move} puts a sum {_differs(sent, wanted)}")
        state = after
    for rank, row in enumerate(state):
        for at, held in enumerate(row):
            where = f"{schedule.algorithm} on {schedule.ranks} ranks: rank {rank} ends, from element {edges[at]} on,"
            if held.ranks != wanted:
                raise LocalProtocolError(f"{where} with a sum {_differs(held.ranks, wanted)}")
            if held.expression != state[0][at].expression:
                raise LocalProtocolError(f"{where} with a sum that was made by other additions than that of rank 0")


def _differs(ranks: int, wanted: int) -> str:
    missing, more = wanted & ~ranks, ranks & ~wanted
    return f"of which {names(missing)} are missing" if missing else f"in which {names(more)} should not be"
