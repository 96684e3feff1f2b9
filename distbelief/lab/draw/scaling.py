"""A picture of what one more replica or partition brings: speed-up against their number, beside the ideal line."""

from __future__ import annotations

import math
from html import escape

from distbelief.lab.plan.scaling import Scaling
from distbelief.lab.study.charts import COLOURS

WIDTH, HEIGHT, ASIDE, LINE = 560, 360, 56, 16
"""Pixels: of the chart, beside it, of a line of text."""
GREY = "#999"


def draw_scaling(found: Scaling) -> str:
    """Draw a line for each way on logarithmic axes, as SVG; what was measured is filled."""
    drawn = [(curve, [(point, point.speedup) for point in curve.points if point.speedup]) for curve in found.curves]
    counts = sorted({point.count for _, points in drawn for point, _ in points})
    least = min(1.0, *(speedup for _, points in drawn for _, speedup in points))
    across, up = math.log(counts[-1]) or 1.0, math.log(counts[-1] / least) or 1.0

    def at(count: float, speedup: float) -> tuple[float, float]:
        return ASIDE + WIDTH * math.log(count) / across, LINE + HEIGHT * (1 - math.log(speedup / least) / up)

    def line(places: list[tuple[float, float]], look: str) -> str:
        return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" {look}/>'

    def text(x: float, y: float, words: object, look: str) -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(str(words))}</text>'

    width, below = WIDTH + 2 * ASIDE, HEIGHT + 4 * LINE
    height = below + LINE * (len(drawn) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>',
        line([at(1, 1), at(counts[-1], counts[-1])], f'stroke="{GREY}" stroke-dasharray="5 4"'),
        text(ASIDE, below, "ideal; filled where it was measured, else simulated", f'fill="{GREY}"'),
    ]
    for count in counts:
        x, y = at(count, count)
        parts += [text(x, HEIGHT + 2 * LINE, count, 'text-anchor="middle"')]
        parts += [text(ASIDE - 6, y + 4, count, 'text-anchor="end"')]
    for number, (curve, points) in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(line([at(point.count, speedup) for point, speedup in points], f'stroke="{colour}"'))
        named = f"{curve.name}: speed-up against {curve.of}s"
        parts.append(text(ASIDE, below + LINE * (number + 1), named, f'fill="{colour}"'))
        for point, speedup in points:
            x, y = at(point.count, speedup)
            how, fill = ("measured", colour) if point.measured else ("simulated", "white")
            title = f"<title>{escape(point.what)}: {speedup:.3g}, {how}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}">{title}</circle>')
    return "\n".join([*parts, "</svg>\n"])
