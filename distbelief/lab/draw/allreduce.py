"""Schedules as text: who holds the sum of whose elements after every step, as the symbolic executor has it."""

from __future__ import annotations

from distbelief.lab.draw.execution import SymbolicSum, execute, wanted_ranks
from distbelief.schedules.price import LinkModel, formula, price
from distbelief.schedules.schedule import Schedule, Step

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw(schedule: Schedule, link: LinkModel, inside: LinkModel | None = None) -> str:
    """Draw what a schedule sends, step by step, and what each rank holds after that; with the price of a megabyte.

    A cell is one part of the vector, and holds a letter for each rank whose elements are in its sum; `=` is the whole.

    Args:
        schedule: of at most 26 ranks.
        link: between two ranks.
        inside: between two of one host.

    >>> from distbelief.schedules.allreduce import schedule
    >>> print(draw(schedule("butterfly", 2, 2), LinkModel(20e-6, 1.25e9)))
    butterfly, 2 ranks: 1 step; all ranks together send 2.0 times the vector
    step 1, added: 1-0 0-1
      rank 0  =
      rank 1  =
    price of 1 MB, at a latency of 20 us and 1.25 GB/s: 0.82 ms
    """
    ranks, count, wanted = schedule.ranks, len(schedule.steps), wanted_ranks(schedule)
    times = schedule.moved / max(schedule.length, 1)
    lines = [
        f"{schedule.algorithm}, {ranks} ranks: {count} step{'' if count == 1 else 's'}; all ranks together send "
        f"{times:.1f} times the vector"
    ]
    states = execute(schedule)
    next(states)
    for number, (step, state) in enumerate(zip(schedule.steps, states, strict=True), 1):
        lines.append(f"step {number}, {_moves(step)}")
        for rank, row in enumerate(state):
            cells = ["=" if held.ranks == wanted else _letters(held) for held in row]
            lines.append(
                f"  rank {rank}  "
                + (" ".join(cell.ljust(ranks) for cell in cells) if ranks > 2 else "".join(cells)).rstrip()
            )
    expected = formula(schedule.algorithm, ranks, schedule.length, schedule.hosts)
    assert expected.moved == schedule.moved
    return "\n".join([*lines, _price(schedule, link, inside)])


def _moves(step: Step) -> str:
    words = {True: list[str](), False: list[str]()}
    for move in step:
        words[move.adds].append(f"{move.source}-{move.target}")
    phrases = [
        f"{'added' if adds else 'put'}: {' '.join(dict.fromkeys(pairs))}" for adds, pairs in words.items() if pairs
    ]
    return "; ".join(phrases)


def _letters(held: SymbolicSum) -> str:
    return "".join(letter for rank, letter in enumerate(LETTERS) if held.ranks >> rank & 1)


def _price(schedule: Schedule, link: LinkModel, inside: LinkModel | None) -> str:
    """Say the price of a megabyte, whatever the length of the schedule."""
    scale = schedule.length * 4 / 1e6
    scaled = LinkModel(link.latency, link.bandwidth * scale, link.reduction)
    within = LinkModel(inside.latency, inside.bandwidth * scale, inside.reduction) if inside else None
    between = f"at a latency of {link.latency * 1e6:g} us and {link.bandwidth / 1e9:g} GB/s"
    if inside:
        between += f" between hosts, {inside.latency * 1e6:g} us and {inside.bandwidth / 1e9:g} GB/s inside"
    return f"price of 1 MB, {between}: {1e3 * price(schedule, 4, scaled, within):.2f} ms"
