"""Scaling: what one more replica, or partition of a model, brings: measured on this machine, simulated beyond it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise, takewhile

import msgspec

from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError
from distbelief.lab.cost.cost import beyond, check_amounts
from distbelief.lab.cost.splitting import SplitCost
from distbelief.lab.plan import halving
from distbelief.lab.plan import plan as planning
from distbelief.lab.plan.candidates import PLANNED, Machines, PlanCandidate, strategies_of
from distbelief.lab.plan.plan import Needs, Row
from distbelief.lab.plan.pricing import Pricing, Terms
from distbelief.places.compute_model import ComputeModel
from distbelief.record.limits import free_memory
from distbelief.schedules.price import LinkModel
from distbelief.split.options import Partitions
from distbelief.strategies import Single
from distbelief.tasks import Task, resolve
from distbelief.transport.cluster_model import NetworkModel

REPLICATED = PLANNED[1:]
ENOUGH = 0.05
"""Share of what one makes; one more that brings less hardly pays."""


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a number of replicas or partitions, beside one."""

    what: str
    count: int
    step: float | None
    """Seconds of a step: measured, else simulated; as are the figures below."""
    measured: float | None
    """Samples a second of all together, on this machine."""
    simulated: float | None
    speedup: float | None
    """Samples a second, over those of one."""
    efficiency: float | None
    """Speed-up over the number of replicas or partitions."""
    more: float | None
    """Speed-up that each has brought that is one more than the point before has."""
    binds: str
    reason: str
    """Why nothing is known; "" where it is."""


class ScalingCurve(msgspec.Struct, frozen=True):
    """A way to train with more and more replicas or partitions."""

    name: str
    of: str
    """replica or partition."""
    points: list[ScalingPoint]
    enough: int | None
    """From how many on one more brings less than `ENOUGH`; None where it brings that to the end."""

    @property
    def told(self) -> str:
        """Sentence on where it ends to pay."""
        brings, part = f"one more {self.of} brings", f"{100 * ENOUGH:g} % of what one makes"
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
    """Return the curve of the rows of so many, of which the first is of one.

    What was measured is compared with what was measured, and what was simulated with what was simulated.
    """
    points: list[ScalingPoint] = []
    for at, (count, row) in enumerate(zip(counts, rows, strict=True)):
        before, last = counts[max(0, at - 1)], rows[max(0, at - 1)]
        known, of_last, of_one = (one.measured if row.measured else one.predicted for one in (row, last, rows[0]))
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
    steps = [(before.count, one.more) for before, one in pairwise(points) if one.more is not None]
    few = list(takewhile(lambda each: each[1] < ENOUGH, reversed(steps)))
    of = "partition" if rows[-1].partitions > 1 else "replica"
    return ScalingCurve(name, of, points, few[-1][0] if few else None)


def _over(terms: Terms | None, of: Terms | None) -> float | None:
    return terms.samples_per_second / of.samples_per_second if terms and of else None


@halving.only_plan()
def scaling(
    task: Task | str, counts: Sequence[int], network: NetworkModel, *, split: Partitions | None = None,
    machines: str = "", topology: str = "", slow: Mapping[int, float] | None = None,
    strategies: Sequence[str] = REPLICATED, batch_size: int, optimizer: Optimizer, max_memory: float | None = None,
    seconds: float = planning.SECONDS, data_dir: str | None = None, told: Callable[[str], None] = lambda _: None,
) -> Scaling:  # fmt: skip
    """Measure what fits this machine, and simulate that and what does not.

    Args:
        task: what is trained.
        counts: of replicas, or of partitions where a split is given; one is always looked at.
        network: between hosts.
        split: how; partitions that are more than this machine's cores have a machine each.
        machines: hosts and their cores, such as "4x8"; where it is empty, as many like this one as replicas need.
        topology: as of `plan`.
        slow: as of `plan`.
        strategies: of the replicas.
        batch_size: samples in a minibatch of a replica.
        optimizer: that steps.
        max_memory: bytes that a process may hold.
        seconds: for all runs together, and as many for the segments of all splits.
        data_dir: folder with the data.
        told: is told what is done.

    Raises:
        UsageError, DataError, TrainingError: as `plan`.
    """
    resolved = resolve(task, data_dir) if isinstance(task, str) else task
    check_amounts(batch_size, 1, {"seconds": seconds, "max-memory": max_memory})
    network.check()
    counts = sorted({1, *counts})
    ComputeModel(slow=dict(slow or {})).check(1 if split else counts[-1])
    hosts = _hosts(machines, topology, counts[-1])
    groups = _split(split, counts, optimizer) if split else _replicated(strategies, counts, hosts, optimizer)
    candidates = {str(one): one for one in chain([PlanCandidate(Single(optimizer=optimizer))], *groups.values())}
    needs = Needs(resolved, batch_size, optimizer, told)
    here = planning.this_machine()
    if split:
        line = LinkModel(network.latency, network.bandwidth)
        for count in counts[1:]:
            needs.split([count], told, split, seconds / len(counts), planning.SHARED if count <= here.cores else line)
    fit = {what: one for what, one in candidates.items() if one.replicas * one.partitions <= here.cores}
    left = {what: free_memory() if what in fit else math.inf for what in candidates}
    rows = {what: needs.row(one, hosts(one.replicas), max_memory, left[what]) for what, one in candidates.items()}
    run = [one for what, one in fit.items() if not rows[what].reason]
    measured = halving.measure(task, run, batch_size, seconds, data_dir, told, halved=False)
    known = planning.measured_rows([rows[what] for what in fit], measured)
    planning.check_rows(known)
    rows |= {row.what: row for row in known}
    pricing, cluster = Pricing(resolved, batch_size), planning.cluster_of(known, needs, here, network)
    cluster = dataclasses.replace(cluster, slow=tuple((slow or {}).items()))
    for what, row in rows.items():
        on = hosts(row.replicas)
        those = dataclasses.replace(cluster, machines=on, topology=topology * (on.hosts > 1))
        [row] = (
            [_split_row(row, needs.splits)] if split else planning.priced_rows([row], candidates, pricing, those, told)
        )
        rows[what] = msgspec.structs.replace(row, measured=None) if machines or slow else row
    curves = [curve_of(name, counts, [rows[str(one)] for one in group]) for name, group in groups.items()]
    notes = [*_ways(needs, split.split if split else ""), *needs.notes, *beyond(max_memory), *planning.busy_cores()]
    return Scaling(task=resolved.reference, batch_size=batch_size, curves=curves, notes=notes)


def _hosts(machines: str, topology: str, replicas: int) -> Callable[[int], Machines]:
    """Return the machines that are named, for any number of replicas; else as many like this one as these need."""
    there, cores = planning.machines_of(machines or None, topology), planning.this_machine().cores
    if machines and replicas > there.hosts * there.cores:
        raise UsageError(f"--replicas {replicas}: {there} have {there.hosts * there.cores} cores; name more machines")
    return lambda count: there if machines else Machines(-(-count // cores), cores)


def _ways(needs: Needs, named: str) -> list[str]:
    """Name the ways by which a model was split over its numbers of partitions, where others than these were named."""
    texts = {count: cost.split.text for count, cost in needs.splits.items() if isinstance(cost, SplitCost)}
    return [f"{count} partitions by {text}" for count, text in texts.items() if text != named]


def _split_row(row: Row, splits: Mapping[int, SplitCost | str]) -> Row:
    """Add to a row what `distbelief split` predicts of its number of partitions, or why they cannot be."""
    costs = [one for count, one in splits.items() if row.partitions in (1, count)]
    cost = next((one for one in costs if isinstance(one, SplitCost)), None)
    if cost is None:
        return msgspec.structs.replace(row, reason=str(costs[0]))
    partitions = cost.partition_costs if row.partitions > 1 else [cost.whole]
    step, sending = (cost.step, cost.sending) if row.partitions > 1 else (cost.whole.step, 0.0)
    computes, update = (
        cost.whole.gathers + max(one.computes for one in partitions),
        max(one.update for one in partitions),
    )
    spared = {"processor": computes + update, "waiting": step - sending - computes - update, "network": sending}
    terms = Terms(computes, update, 0.0, step - computes - update, cost.batch_size / step, 0.0, spared=spared)
    return msgspec.structs.replace(row, predicted=terms)


def _replicated(
    names: Sequence[str], counts: Sequence[int], hosts: Callable[[int], Machines], optimizer: Optimizer
) -> dict[str, list[PlanCandidate]]:
    """Return each strategy with each number of replicas; `single` where it has no form with one."""
    if PLANNED[0] in names:
        raise UsageError(f"--strategies {PLANNED[0]}: has one replica, and is what others are beside; leave it off")
    alone = Single(optimizer=optimizer)
    return {
        name: [PlanCandidate(next(strategies_of(name, hosts(one), 1, optimizer, [one]), alone)) for one in counts]
        for name in names
    }


def _split(split: Partitions, counts: Sequence[int], optimizer: Optimizer) -> dict[str, list[PlanCandidate]]:
    """Return one process, and the model split over each other number."""
    words = {**vars(split), "optimizer": optimizer}
    kinds = [Single(**{**words, "partitions": count}) for count in counts[1:]]
    return {split.split: [PlanCandidate(kind) for kind in (Single(optimizer=optimizer), *kinds)]}
