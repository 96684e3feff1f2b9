"""Schedules as text: who holds the sum of whose elements after every step, drawn from the schedule itself."""

from __future__ import annotations

from distbelief.core.collectives import Schedule
from distbelief.core.cost import Link, formula, price
from distbelief.core.proof import prove

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw(schedule: Schedule, link: Link, inside: Link | None = None) -> str:
    """What a schedule sends, step by step, and what each rank holds after that; with the price of a megabyte.

    A cell is one part of the vector, and holds a letter for each rank whose elements are in its sum; `=` is the whole sum.

    Args:
        schedule: of at most 26 ranks; it is proved first.
        link: between two ranks.
        inside: between two of one host.

    >>> from distbelief.core.algorithms import schedule
    >>> print(draw(schedule("butterfly", 2, 2), Link(20e-6, 1.25e9)))
    butterfly, 2 ranks: 1 step; all ranks together send 2.0 times the vector
    step 1, added: 1-0 0-1
      rank 0  =
      rank 1  =
    price of 1 MB, at a latency of 20 us and 1.25 GB/s: 0.82 ms
    """
    prove(schedule)
    length, ranks = schedule.length, schedule.ranks
    steps, times = len(schedule.steps), schedule.moved / max(length, 1)
    lines = [f"{schedule.algorithm}, {ranks} ranks: {steps} step{'' if steps == 1 else 's'}; all ranks together send {times:.1f} times the vector"]
    edges = sorted({0, length, *(edge for t in schedule.transfers for edge in (t.start, t.stop))})
    held = [[{rank} for _ in edges[1:]] for rank in range(ranks)]
    width = max(1, ranks - 1) + 1 if ranks > 2 else 1
    for number, step in enumerate(schedule.steps, 1):
        before = [[set(cell) for cell in row] for row in held]
        words = {True: list[str](), False: list[str]()}
        for t in step:
            words[t.adds].append(f"{t.source}-{t.target}")
            for at in range(edges.index(t.start), edges.index(t.stop)):
                held[t.target][at] = before[t.source][at] | (held[t.target][at] if t.adds else set())
        told = [f"{'added' if adds else 'put'}: {' '.join(dict.fromkeys(those))}" for adds, those in words.items() if those]
        lines.append(f"step {number}, {'; '.join(told)}")
        for rank, row in enumerate(held):
            cells = ["=" if len(cell) == ranks else "".join(LETTERS[one] for one in sorted(cell)) for cell in row]
            lines.append(f"  rank {rank}  " + (" ".join(cell.ljust(width) for cell in cells).rstrip() if ranks > 2 else "".join(cells)))
    expected = formula(schedule.algorithm, ranks, length, schedule.hosts)
    assert expected.moved == schedule.moved
    scaled = Link(link.latency, link.bandwidth * length * 4 / 1e6, link.reduction)
    within = Link(inside.latency, inside.bandwidth * length * 4 / 1e6, inside.reduction) if inside else None
    lines.append(
        f"price of 1 MB, at a latency of {link.latency * 1e6:g} us and {link.bandwidth / 1e9:g} GB/s"
        + (f" between hosts, {inside.latency * 1e6:g} us and {inside.bandwidth / 1e9:g} GB/s inside" if inside else "")
        + f": {1e3 * price(schedule, 4, scaled, within):.2f} ms"
    )
    return "\n".join(lines)
