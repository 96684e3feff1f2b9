"""Drawings of schedules: the sums that ranks hold after each step as text, and pipelines as text and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from itertools import combinations
from typing import NamedTuple

from distbelief.errors import LocalProtocolError
from distbelief.record.summary import many
from distbelief.schedules.pipeline import Crossing, Pass, Pipeline, SegmentTask
from distbelief.schedules.pipeline_price import PipelinePrice, SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel, formula, price
from distbelief.schedules.schedule import Move, Postcondition, Schedule, Step


class SymbolicSum(NamedTuple):
    """Sum of the elements that some ranks began with, as symbols."""

    ranks: int
    expression: int
    """Number of the sum's expression, the same for a + b and b + a; sums with the same number have equal bits."""


State = list[list[SymbolicSum]]
"""Sums that each rank holds between two edges of a schedule: a row for each rank."""


def execute(schedule: Schedule) -> Iterator[State]:
    """Yield the sums that ranks hold at the beginning, and after each step.

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
    """Return a bit for each rank whose elements are in the final sum."""
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


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_schedule(schedule: Schedule, link: LinkModel, inside: LinkModel | None = None) -> str:
    """Draw what a schedule of at most 26 ranks sends in each step, what each rank then holds, and a megabyte's price.

    A cell is one part of the vector, and holds a letter for each rank whose elements are in its sum; `=` is the whole.

    >>> from distbelief.schedules.allreduce import schedule
    >>> print(draw_schedule(schedule("butterfly", 2, 2), LinkModel(20e-6, 1.25e9)))
    butterfly, 2 ranks: 1 step; all ranks together send 2.0 times the vector
    step 1, added: 1-0 0-1
      rank 0  =
      rank 1  =
    price of 1 MB, at a latency of 20 us and 1.25 GB/s: 0.82 ms
    """
    ranks, count, wanted = schedule.ranks, len(schedule.steps), wanted_ranks(schedule)
    times = schedule.moved / max(schedule.length, 1)
    lines = [
        f"{schedule.algorithm}, {ranks} ranks: {many(count, 'step')}; all ranks together send "
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
    scale = schedule.length * 4 / 1e6
    scaled = LinkModel(link.latency, link.bandwidth * scale, link.reduction)
    within = LinkModel(inside.latency, inside.bandwidth * scale, inside.reduction) if inside else None
    between = f"at a latency of {link.latency * 1e6:g} us and {link.bandwidth / 1e9:g} GB/s"
    if inside:
        between += f" between hosts, {inside.latency * 1e6:g} us and {inside.bandwidth / 1e9:g} GB/s inside"
    return f"price of 1 MB, {between}: {1e3 * price(schedule, 4, scaled, within):.2f} ms"


COLOURS = {Pass.FORWARD: "#9ec5f4", Pass.BACKWARD: "#f4c08c"}
ROW, LABEL, WIDTH = 26, 64, 1000
"""Pixels: of a partition's row, of its name, and of the time."""


def draw_pipeline(pipeline: Pipeline) -> str:
    """Draw a row for each partition, and a column for the time of a segment, forward or backward.

    `F2` is microbatch 2 forward, `B2` the same backward, and `.` a wait. A partition's segments stand side by side.

    >>> from distbelief.schedules.pipeline import chain
    >>> from distbelief.schedules.pipeline import pipeline
    >>> print(draw_pipeline(pipeline("1f1b", chain(2), 3)))
    1f1b, 2 partitions, 3 microbatches: 6 crossings; partitions wait 25 % of the time if all segments take equally long
      partition 0  F0 F1 .  B0 F2 B1 .  B2    2 in flight
      partition 1  .  F0 B0 F1 B1 F2 B2 .     1 in flight
    """
    graph = pipeline.graph
    price = price_pipeline(pipeline, [SegmentCost(1, 1)] * len(graph.segments))
    rows = [["."] * round(price.seconds) for _ in range(graph.partitions)]
    for span in price.spans:
        rows[span.partition][round(span.start)] = _name(span.task)
    width = max((len(cell) for row in rows for cell in row), default=0)
    crossings = len({action for actions in pipeline.actions for action in actions if isinstance(action, Crossing)})
    lines = [
        f"{pipeline.algorithm}, {many(graph.partitions, 'partition')}, "
        f"{many(pipeline.microbatches, 'microbatch', 'es')}: "
        f"{crossings} crossings; partitions wait {100 * price.idle:.0f} % of the time if all segments take equally long"
    ]
    for partition, row in enumerate(rows):
        cells = " ".join(cell.ljust(width) for cell in row)
        lines.append(f"  partition {partition}  {cells}   {pipeline.in_flight[partition]} in flight")
    return "\n".join(lines)


def _name(task: SegmentTask) -> str:
    return f"{task.direction.name[0]}{task.microbatch}"


def draw_svg(pipeline: Pipeline, price: PipelinePrice) -> str:
    """Draw the tasks of each partition to the scale of time, as SVG."""
    graph, scale = pipeline.graph, WIDTH / (price.seconds or 1.0)
    height = ROW * (graph.partitions + 2)
    heading = (
        f"{pipeline.algorithm}, {pipeline.microbatches} microbatches: {1e3 * price.seconds:.3g} ms, "
        f"and partitions wait {100 * price.idle:.0f} % of it"
    )
    parts = [
        f'<text x="4" y="{ROW - 9}">{escape(heading)}</text>',
        *(
            f'<text x="4" y="{ROW * (partition + 2) - 9}">partition {partition}</text>'
            for partition in range(graph.partitions)
        ),
    ]
    for span in price.spans:
        task, x, y = span.task, LABEL + span.start * scale, ROW * (span.partition + 1)
        width, took = (span.stop - span.start) * scale, 1e3 * (span.stop - span.start)
        title = f"{graph.segments[task.segment].name}: {_name(task)}, {took:.3g} ms"
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{ROW - 4}" fill="{COLOURS[task.direction]}" '
            f'stroke="#444" stroke-width="0.5"><title>{escape(title)}</title></rect>'
        )
        if width > 7 * len(_name(task)):
            parts.append(f'<text x="{x + width / 2:.2f}" y="{y + ROW - 9}" text-anchor="middle">{_name(task)}</text>')
    axis = ROW * (graph.partitions + 1) + 14
    parts.append(f'<text x="{LABEL}" y="{axis}">0</text>')
    parts.append(f'<text x="{LABEL + WIDTH}" y="{axis}" text-anchor="end">{1e3 * price.seconds:.3g} ms</text>')
    return svg(LABEL + WIDTH + 8, height, parts)


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    """Return a picture of these parts on white."""
    font = 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])
