"""The checker of schedules: it follows every element through every step, by what it is the sum of, and owes nothing to how a schedule was made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from distbelief.core.collectives import Schedule, Transfer
from distbelief.errors import LocalProtocolError

Sum = tuple[int, int]
"""The sum of some ranks' elements: which, as bits, and the number of the expression by which it was made; that is the same for a + b and b + a."""


def prove(schedule: Schedule) -> None:
    """Prove that a schedule is an all-reduce, for whatever the ranks hold.

    At its end every rank has, of each element, the sum over all ranks, each counted once, and made by the same additions up to the order of
    their two operands: so that all have the same bits. No sum is sent on as the whole one before it is; and no rank receives two things into one
    place at one step, but to add them.

    Raises:
        LocalProtocolError: it is none; with the step and the transfer.

    >>> from distbelief.core.algorithms import schedule
    >>> prove(schedule("butterfly", 6, 10))
    """
    edges = sorted({0, schedule.length, *(edge for t in schedule.transfers for edge in (t.start, t.stop))})
    if edges[-1] > schedule.length or edges[0] < 0:
        raise LocalProtocolError(f"{schedule.algorithm} moves elements {edges[0]} to {edges[-1]} of {schedule.length}")
    cell = {edge: number for number, edge in enumerate(edges)}
    known: dict[tuple[int, int], int] = {}
    held: list[list[Sum]] = [[(1 << rank, -1 - rank)] * (len(edges) - 1) for rank in range(schedule.ranks)]
    everybody = (1 << schedule.ranks) - 1
    for number, step in enumerate(schedule.steps):
        where = f"{schedule.algorithm} of {schedule.length} elements on {schedule.ranks} ranks, step {number}"
        _check_places(where, step, schedule.ranks)
        before = [list(row) if any(t.source == rank for t in step) else row for rank, row in enumerate(held)]
        for transfer in step:
            for at in range(cell[transfer.start], cell[transfer.stop]):
                sent, own = before[transfer.source][at], held[transfer.target][at]
                if not transfer.adds:
                    if sent[0] != everybody:
                        raise LocalProtocolError(f"{where}: {transfer} puts a sum of which {_ranks(everybody & ~sent[0])} are missing")
                    held[transfer.target][at] = sent
                elif sent[0] & own[0]:
                    raise LocalProtocolError(f"{where}: {transfer} adds {_ranks(sent[0] & own[0])} a second time")
                else:
                    pair = (min(sent[1], own[1]), max(sent[1], own[1]))
                    held[transfer.target][at] = sent[0] | own[0], known.setdefault(pair, len(known))
    for rank, row in enumerate(held):
        for at, (ranks, expression) in enumerate(row):
            where = f"{schedule.algorithm} on {schedule.ranks} ranks: rank {rank} ends, from element {edges[at]} on, with"
            if ranks != everybody:
                raise LocalProtocolError(f"{where} a sum of which {_ranks(everybody & ~ranks)} are missing")
            if expression != held[0][at][1]:
                raise LocalProtocolError(f"{where} a sum that was made by other additions than that of rank 0")


def _check_places(where: str, step: Iterable[Transfer], ranks: int) -> None:
    coming: dict[int, list[Transfer]] = {}
    for transfer in step:
        if transfer.source == transfer.target or not (0 <= transfer.source < ranks and 0 <= transfer.target < ranks) or transfer.length < 1:
            raise LocalProtocolError(f"{where}: {transfer} is no transfer between two of {ranks} ranks")
        coming.setdefault(transfer.target, []).append(transfer)
    for transfers in coming.values():
        puts = [t for t in transfers if not t.adds]
        for one, other in combinations(transfers, 2) if puts else ():
            if one.start < other.stop and other.start < one.stop:
                raise LocalProtocolError(f"{where}: {one} and {other} reach the same elements")


def _ranks(bits: int) -> str:
    return ", ".join(f"rank {rank}" for rank in range(bits.bit_length()) if bits >> rank & 1)
