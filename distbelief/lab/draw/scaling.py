"""What one more replica or partition brings, as a picture: speed-up against their number, beside the ideal line."""

from __future__ import annotations

import math
from html import escape

from distbelief.lab.plan.scaling import Scaling
from distbelief.lab.study.charts import COLOURS

WIDTH, HEIGHT, ASIDE, LINE = 560, 360, 56, 16
"""Pixels: of the chart, beside it, of a line of the legend."""


def draw_scaling(found: Scaling) -> str:
    """A line for each way, on logarithmic axes; what was measured is filled.

    Returns:
        The picture, as SVG.
    """
    points = [point for curve in found.curves for point in curve.points if point.speedup]
    most, least = max(point.count for point in points), min(1.0, *(point.speedup or 1.0 for point in points))

    def at(count: float, speedup: float) -> tuple[float, float]:
        span = math.log(most / least) or 1.0
        across = math.log(count) / (math.log(most) or 1.0)
        return ASIDE + WIDTH * across, LINE + HEIGHT * (1 - math.log(speedup / least) / span)

    bottom, below = at(1, least)[1], HEIGHT + 4 * LINE
    height = below + LINE * (len(found.curves) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * ASIDE} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH + 2 * ASIDE}" height="{height}" fill="white"/>',
    ]
    for count in sorted({point.count for point in points}):
        x, y = at(count, count)
        parts.append(f'<text x="{x:.1f}" y="{bottom + LINE:.1f}" text-anchor="middle">{count}</text>')
        parts.append(f'<text x="{ASIDE - 6}" y="{y + 4:.1f}" text-anchor="end">{count}</text>')
    parts.append(_path([at(1, 1), at(most, most)], "#999", ' stroke-dasharray="5 4"'))
    names = [("ideal", "#999")]
    for number, curve in enumerate(found.curves):
        colour = COLOURS[number % len(COLOURS)]
        names.append((f"{curve.name}, speed-up against {curve.of}s", colour))
        drawn = [(at(point.count, point.speedup), point) for point in curve.points if point.speedup]
        parts.append(_path([place for place, _ in drawn], colour))
        for (x, y), point in drawn:
            fill = colour if point.measured else "white"
            title = f"{point.what}: {point.speedup:.3g}, {'measured' if point.measured else 'simulated'}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}">'
                f"<title>{escape(title)}</title></circle>"
            )
    for number, (name, colour) in enumerate(names):
        y = below + LINE * number
        parts.append(f'<text x="{ASIDE}" y="{y}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _path(places: list[tuple[float, float]], colour: str, dashes: str = "") -> str:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
