"""Picture of a split model: modules of each partition from top to bottom, and transfers of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from distbelief.lab.draw.schedules import svg
from distbelief.split.graph import Transfer, TransferKind
from distbelief.split.program import PartitionProgram, Segment

COLOURS = {
    TransferKind.SEND: "#2c6fbb",
    TransferKind.GATHER: "#2a8a57",
    TransferKind.SUM: "#c06a15",
    TransferKind.HALO: "#8a4fbf",
    TransferKind.TENSOR: "#777777",
}
WIDTH, ASIDE, LINE, BETWEEN, TOP = 250, 70, 15, 34, 56
"""Pixels: of a box, between two columns, of a line of text, between two rows, above the first."""


class _Box(NamedTuple):
    lines: tuple[str, ...]
    x: int
    y: int

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 8


def draw_split(programs: Sequence[PartitionProgram]) -> str:
    """Draw a column for each partition, a box for each segment, and arrows for transfers, as SVG.

    Gradients take the same arrows back. A box lists first what it receives from other partitions: tensors, with the
    bytes of one sample (or of a parameter).
    """
    segments = programs[0].split.segments
    arrivals = _arrivals(segments)
    texts = [_lines(programs[segment.partition], segment, arrivals[segment.number]) for segment in segments]
    givers = {transfer: segment.number for segment in segments for transfer in segment.sent}
    boxes = _laid_out(segments, texts, givers)
    width = ASIDE + len(programs) * (WIDTH + ASIDE)
    height = max(box.y + box.height for box in boxes) + 16
    parts = _headings(programs)
    for number, transfers in enumerate(arrivals):
        parts += [_arrow(boxes[givers[transfer]], boxes[number], transfer) for transfer in transfers]
    for box in boxes:
        parts += _drawn(box)
    return svg(width, height, parts)


def _arrivals(segments: Sequence[Segment]) -> list[list[Transfer]]:
    """Return for each segment the transfers that no earlier segment of its partition receives."""
    here: set[Transfer] = set()
    arrivals = []
    for segment in segments:
        arrivals.append([transfer for transfer in segment.received if transfer not in here])
        here.update(segment.received)
    return arrivals


def _lines(program: PartitionProgram, segment: Segment, transfers: Sequence[Transfer]) -> tuple[str, ...]:
    alike: dict[tuple[str, int], int] = {}
    for transfer in transfers:
        key = transfer.kind.value, transfer.shape.bytes_each
        alike[key] = alike.get(key, 0) + 1
    lines = [f"takes {kind} {f'{count} x ' if count > 1 else ''}{size:,} B" for (kind, size), count in alike.items()]
    return (*lines, *(_module(program, path) for path in segment.paths)) or ("gives tensors to others",)


def _module(program: PartitionProgram, path: str) -> str:
    """Return a module's path, and the part of its first divided tensor at this partition."""
    for name, piece in program.pieces.items():
        if name.startswith(f"{path}."):
            before = ":, " * piece.dimension
            return f"{path}  {name.rpartition('.')[2]}[{before}{piece.start}:{piece.stop}]"
    return path or "the loss"


def _laid_out(
    segments: Sequence[Segment], texts: Sequence[tuple[str, ...]], givers: Mapping[Transfer, int]
) -> list[_Box]:
    """Place each segment below all that it waits for."""
    rows: list[int] = []
    last: dict[int, int] = {}
    for segment in segments:
        before = [rows[givers[transfer]] for transfer in segment.received]
        rows.append(1 + max([*before, last.get(segment.partition, -1)]))
        last[segment.partition] = rows[-1]
    tall = [0] * (max(rows) + 1)
    for row, text in zip(rows, texts, strict=True):
        tall[row] = max(tall[row], LINE * len(text) + 8)
    tops = [TOP + sum(tall[:row]) + BETWEEN * row for row in range(len(tall))]
    return [
        _Box(text, ASIDE + segment.partition * (WIDTH + ASIDE), tops[row])
        for segment, text, row in zip(segments, texts, rows, strict=True)
    ]


def _headings(programs: Sequence[PartitionProgram]) -> list[str]:
    headings = []
    for program in programs:
        count = sum(parameter.numel() for parameter in program.module.parameters())
        x = ASIDE + program.partition * (WIDTH + ASIDE) + WIDTH // 2
        headings.append(
            f'<text x="{x}" y="22" text-anchor="middle" font-size="13">'
            f"partition {program.partition}: {count:,} parameters</text>"
        )
    return headings


def _arrow(source: _Box, target: _Box, transfer: Transfer) -> str:
    x, y = source.x + WIDTH / 2, source.y + source.height
    to, end = target.x + WIDTH / 2, target.y
    colour, title = COLOURS[transfer.kind], f"{transfer.kind.value}: {transfer.path}, {transfer.shape.bytes_each:,} B"
    return (
        f'<path d="M{x:g} {y} C{x:g} {y + 24} {to:g} {end - 28} {to:g} {end - 6}" fill="none" stroke="{colour}" '
        f'stroke-width="1.5"><title>{escape(title)}</title></path>'
        f'<polygon points="{to:g},{end} {to - 4:g},{end - 7} {to + 4:g},{end - 7}" fill="{colour}"/>'
    )


def _drawn(box: _Box) -> list[str]:
    parts = [
        f'<rect x="{box.x}" y="{box.y}" width="{WIDTH}" height="{box.height}" rx="3" fill="#f4f7fb" stroke="#445"/>'
    ]
    for number, line in enumerate(box.lines):
        style = ' fill="#555" font-style="italic"' if line.startswith("takes ") else ""
        parts.append(f'<text x="{box.x + 8}" y="{box.y + LINE * (number + 1)}"{style}>{escape(line)}</text>')
    return parts
