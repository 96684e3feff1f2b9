"""Pipelines as text and as SVG: who computes what when."""

from __future__ import annotations

from html import escape

from distbelief.schedules.pipeline import Crossing, Pass, Pipeline, SegmentTask
from distbelief.schedules.pipeline_price import PipelinePrice, SegmentCost, price_pipeline

COLOURS = {Pass.FORWARD: "#9ec5f4", Pass.BACKWARD: "#f4c08c"}
ROW, LABEL, WIDTH = 26, 64, 1000
"""Pixels: of a partition's row, of its name, and of the time."""


def draw_pipeline(pipeline: Pipeline) -> str:
    """Draw who computes what when: a row for each partition, a column for the time of a segment, as long either way.

    `F2` is microbatch 2 on its way forward, `B2` on its way back, and `.` waits. A partition's segments stand side by
    side.

    >>> from distbelief.schedules.pipeline import chain
    >>> from distbelief.schedules.pipeline import pipeline
    >>> print(draw_pipeline(pipeline("1f1b", chain(2), 3)))
    1f1b, 2 partitions, 3 microbatches: 6 crossings; partitions wait 25 % of the time where all takes as long
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
        f"{pipeline.algorithm}, {_count(graph.partitions, 'partition')}, "
        f"{_count(pipeline.microbatches, 'microbatch')}: "
        f"{crossings} crossings; partitions wait {100 * price.idle:.0f} % of the time where all takes as long"
    ]
    for partition, row in enumerate(rows):
        cells = " ".join(cell.ljust(width) for cell in row)
        lines.append(f"  partition {partition}  {cells}   {pipeline.in_flight[partition]} in flight")
    return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "es" if word.endswith("ch") else "s")


def _name(task: SegmentTask) -> str:
    return f"{task.direction.name[0]}{task.microbatch}"


def draw_svg(pipeline: Pipeline, price: PipelinePrice) -> str:
    """Draw who computes what when, to the scale of time: a picture as SVG.

    Args:
        pipeline: what was priced.
        price: of it, in seconds.

    >>> from distbelief.schedules.pipeline import chain
    >>> from distbelief.schedules.pipeline import pipeline
    >>> made = pipeline("gpipe", chain(2), 2)
    >>> draw_svg(made, price_pipeline(made, [SegmentCost(1e-3, 2e-3)] * 2)).count("<rect")
    9
    """
    graph, scale = pipeline.graph, WIDTH / (price.seconds or 1.0)
    height = ROW * (graph.partitions + 2)
    heading = (
        f"{pipeline.algorithm}, {pipeline.microbatches} microbatches: {1e3 * price.seconds:.3g} ms, "
        f"of which partitions wait {100 * price.idle:.0f} %"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + WIDTH + 8} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{LABEL + WIDTH + 8}" height="{height}" fill="white"/>',
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
    return "\n".join([*parts, "</svg>\n"])
