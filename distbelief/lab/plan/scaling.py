"""Scaling: the gain of one more replica, or partition of a model, measured on this machine and simulated beyond it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain, pairwise, takewhile

import msgspec

from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError
from distbelief.lab.cost.cost import beyond
from distbelief.lab.cost.options import PlanRequest
from distbelief.lab.cost.splitting import SplitCost
from distbelief.lab.draw.schedules import svg
from distbelief.lab.plan import halving
from distbelief.lab.plan import plan as planning
from distbelief.lab.plan.candidates import PLANNED, Machines, PlanCandidate, strategies_of
from distbelief.lab.plan.plan import Needs, Row
from distbelief.lab.plan.pricing import Pricing, Terms
from distbelief.lab.study.charts import COLOURS
from distbelief.places.compute_model import ComputeModel
from distbelief.record.limits import free_memory
from distbelief.schedules.price import LinkModel
from distbelief.split.options import Partitions
from distbelief.strategies import Single
from distbelief.tasks import Task

REPLICATED = PLANNED[1:]
ENOUGH = 0.05
"""Share of one replica's or partition's rate below which one more hardly pays."""


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a number of replicas or partitions, beside those of one."""

    what: str
    count: int
    step: float | None
    """Seconds of a step: measured if possible, else simulated; so are the figures below."""
    measured: float | None
    simulated: float | None
    speedup: float | None
    efficiency: float | None
    more: float | None
    """Added speed-up per added replica or partition since the previous point."""
    binds: str
    reason: str


class ScalingCurve(msgspec.Struct, frozen=True):
    """Way to train with a growing number of replicas or partitions."""

    name: str
    of: str
    points: list[ScalingPoint]
    enough: int | None
    """Number beyond which one more brings less than `ENOUGH`; None if it never does."""

    @property
    def told(self) -> str:
        """Say beyond which number one more hardly pays."""
        brings, part = f"one more {self.of} brings", f"{100 * ENOUGH:g} % of the rate of one"
        if self.enough is None:
            known = [point.count for point in self.points if point.more is not None]
            return f"{self.name}: up to {known[-1]}, {brings} {part}, or more" if known else ""
        return f"{self.name}: beyond {self.enough}, {brings} under {part}"


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of a task."""

    task: str
    batch_size: int
    curves: list[ScalingCurve]
    notes: list[str]


def curve_of(name: str, counts: Sequence[int], rows: Sequence[Row]) -> ScalingCurve:
    """Return the curve of these rows; the first has one replica and one partition.

    Measured rates are compared with measured ones only, simulated with simulated.
    """
    points: list[ScalingPoint] = []
    for at, (count, row) in enumerate(zip(counts, rows, strict=True)):
        before, last = counts[max(0, at - 1)], rows[max(0, at - 1)]
        known, of_last, of_one = (other.measured if row.measured else other.predicted for other in (row, last, rows[0]))
        speedup, more = (_over(terms, of_one) for terms in (known, of_last))
        brings = (speedup - more) / (count - before) if at and speedup and more else None
        points.append(
            ScalingPoint(
                what=row.what,
                count=count,
                step=known.step if known else None,
                measured=row.measured.samples_per_second if row.measured else None,
                simulated=row.predicted.samples_per_second if row.predicted else None,
                speedup=speedup,
                efficiency=speedup / count if speedup else None,
                more=brings,
                binds=row.predicted.binds if row.predicted else "",
                reason=row.reason,
            )
        )
    steps = [(before.count, point.more) for before, point in pairwise(points) if point.more is not None]
    few = list(takewhile(lambda each: each[1] < ENOUGH, reversed(steps)))
    of = "partition" if rows[-1].partitions > 1 else "replica"
    return ScalingCurve(name, of, points, few[-1][0] if few else None)


def _over(terms: Terms | None, of: Terms | None) -> float | None:
    return terms.samples_per_second / of.samples_per_second if terms and of else None


@halving.only_plan()
def scaling(
    task: Task | str,
    counts: Sequence[int],
    request: PlanRequest,
    split: Partitions | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Scaling:
    """Measure the numbers that fit this machine, and simulate all.

    The counts are of replicas, or of partitions if a split is named; 1 is always among them. More partitions than this
    machine has cores have a machine each. Errors are those of `plan`.
    """
    resolved = planning.resolved_task(task, request)
    counts = sorted({1, *counts})
    ComputeModel(slow=dict(request.slow)).check(1 if split else counts[-1])
    hosts = _hosts(request, counts[-1])
    groups = _split(split, counts, request.optimizer) if split else _replicated(request, counts, hosts)
    alone = PlanCandidate(Single(optimizer=request.optimizer))
    candidates = {str(candidate): candidate for candidate in chain([alone], *groups.values())}
    needs, here = Needs(resolved, request, tell), planning.this_machine()
    if split:
        line, seconds = LinkModel(request.network.latency, request.network.bandwidth), request.seconds / len(counts)
        for count in counts[1:]:
            needs.split([count], tell, split, seconds, planning.SHARED if count <= here.cores else line)
    fit = {what: way for what, way in candidates.items() if way.replicas * way.partitions <= here.cores}
    left = {what: free_memory() if what in fit else math.inf for what in candidates}
    rows = {
        what: needs.row(way, hosts(way.replicas), request.max_memory, left[what]) for what, way in candidates.items()
    }
    run = [way for what, way in fit.items() if not rows[what].reason]
    measured = halving.measure(task, run, request, tell, halved=False)
    known = planning.measured_rows([rows[what] for what in fit], measured)
    planning.check_rows(known)
    rows |= {row.what: row for row in known}
    pricing, cluster = Pricing(resolved, request.batch_size), planning.cluster_of(known, needs, here, request)
    cluster = dataclasses.replace(cluster, slow=tuple(request.slow.items()))
    for what, row in rows.items():
        on = hosts(row.replicas)
        those = dataclasses.replace(cluster, machines=on, topology=request.topology * (on.hosts > 1))
        if split:
            row = _split_row(row, needs.splits)
        else:
            [row] = planning.priced_rows([row], candidates, pricing, those, tell)
        rows[what] = msgspec.structs.replace(row, measured=None) if request.machines or request.slow else row
    curves = [curve_of(name, counts, [rows[str(way)] for way in group]) for name, group in groups.items()]
    notes = [*_ways(needs, split.split if split else ""), *needs.notes, *beyond(request.max_memory)]
    notes += planning.busy_cores()
    return Scaling(task=resolved.reference, batch_size=request.batch_size, curves=curves, notes=notes)


def _hosts(request: PlanRequest, replicas: int) -> Callable[[int], Machines]:
    there, cores = planning.machines_of(request), planning.this_machine().cores
    if request.machines and replicas > there.hosts * there.cores:
        raise UsageError(f"--replicas {replicas}: {there} have {there.hosts * there.cores} cores; name more machines")
    return lambda count: there if request.machines else Machines(-(-count // cores), cores)


def _ways(needs: Needs, named: str) -> list[str]:
    texts = {count: cost.split.text for count, cost in needs.splits.items() if isinstance(cost, SplitCost)}
    return [f"{count} partitions by {text}" for count, text in texts.items() if text != named]


def _split_row(row: Row, splits: Mapping[int, SplitCost | str]) -> Row:
    """Add the prediction of `distbelief split` to a row, or why there is none."""
    results = [split for count, split in splits.items() if row.partitions in (1, count)]
    cost = next((split for split in results if isinstance(split, SplitCost)), None)
    if cost is None:
        return msgspec.structs.replace(row, reason=str(results[0]))
    partitions = cost.partition_costs if row.partitions > 1 else [cost.whole]
    step, sending = (cost.step, cost.sending) if row.partitions > 1 else (cost.whole.step, 0.0)
    computes = cost.whole.gathers + max(partition.computes for partition in partitions)
    update = max(partition.update for partition in partitions)
    spared = {"processor": computes + update, "waiting": step - sending - computes - update, "network": sending}
    terms = Terms(computes, update, 0.0, step - computes - update, cost.batch_size / step, 0.0, spared=spared)
    return msgspec.structs.replace(row, predicted=terms)


def _replicated(
    request: PlanRequest, counts: Sequence[int], hosts: Callable[[int], Machines]
) -> dict[str, list[PlanCandidate]]:
    """Return each strategy with each number of replicas; `single` for one if the strategy needs several."""
    names, optimizer = request.strategies or REPLICATED, request.optimizer
    if PLANNED[0] in names:
        raise UsageError(f"--strategies {PLANNED[0]}: has one replica, and all are compared with it; leave it off")
    alone = Single(optimizer=optimizer)
    return {
        name: [PlanCandidate(next(strategies_of(name, hosts(count), 1, optimizer, [count]), alone)) for count in counts]
        for name in names
    }


def _split(split: Partitions, counts: Sequence[int], optimizer: Optimizer) -> dict[str, list[PlanCandidate]]:
    words = {**vars(split), "optimizer": optimizer}
    kinds = [Single(**{**words, "partitions": count}) for count in counts[1:]]
    return {split.split: [PlanCandidate(kind) for kind in (Single(optimizer=optimizer), *kinds)]}


WIDTH, HEIGHT, ASIDE, LINE = 560, 360, 56, 16
"""Pixels: of the chart, beside it, of a line of text."""
GREY = "#999"


def draw_scaling(figures: Scaling) -> str:
    """Draw a line for each way on logarithmic axes as SVG; measured points are filled."""
    drawn = [(curve, [(point, point.speedup) for point in curve.points if point.speedup]) for curve in figures.curves]
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
        line([at(1, 1), at(counts[-1], counts[-1])], f'stroke="{GREY}" stroke-dasharray="5 4"'),
        text(ASIDE, below, "ideal; filled points were measured, others simulated", f'fill="{GREY}"'),
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
    return svg(width, height, parts)
