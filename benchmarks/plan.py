"""The first row of a plan for this machine, compared with the best of all its candidates in separate jobs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from benchmarks.parts import workloads
from benchmarks.parts.timing import (
    BenchOptions,
    Figure,
    Measured,
    Table,
    check_names,
    check_repeats,
    figure,
    interleave,
    spread,
)
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.lab import number
from distbelief.lab.cost.options import PlanRequest
from distbelief.lab.plan.candidates import PLANNED, candidates
from distbelief.lab.plan.halving import MOST_EPOCHS
from distbelief.lab.plan.plan import plan, this_machine

OF_BEST = 0.95
"""Least share of the best candidate's rate for the plan's first, unless the best's slowest run is slower."""
LONGEST = 45.0
"""Time limit in seconds for plans of the MLP and LeNet."""
WORKLOADS = "benchmarks.parts.workloads:"
BATCH, SGD = 64, optim("sgd", lr=0.01)


class PlannedModel(NamedTuple):
    """A model to plan for."""

    task: str
    strategies: tuple[str, ...] = PLANNED


MODELS: Mapping[str, PlannedModel] = {
    "mlp": PlannedModel("mnist"),
    "lenet": PlannedModel("mnist-lenet"),
    "split": PlannedModel(f"{WORKLOADS}mlp_wide_short", ("single",)),
}
QUICK_TASK = f"{WORKLOADS}mlp_quick"
"""Models planned with --quick, with at most two strategies."""


@dataclass(frozen=True)
class PlanBenchOptions(BenchOptions):
    """Options of the benchmark plan."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models to plan for: mlp, lenet and split (784-2048-2048-10, whole and over two processes)."""
    repeats: int = 3
    """Jobs of each candidate, in turns."""
    seconds: float = 4.0
    """Samples that each job trains."""


def run(options: PlanBenchOptions) -> Measured:
    """Measure."""
    check_names("model", options.models, MODELS)
    check_repeats(options.repeats)
    models = {name: _of_model(MODELS[name], options) for name in options.models}
    return Measured(
        {"repeats": options.repeats, "models": models},
        [one for name, found in models.items() for one in _figures(name, found)],
        [_table(name, found) for name, found in models.items()],
    )


def _of_model(model: PlannedModel, options: PlanBenchOptions) -> Json:
    """Make a plan, and then run jobs of each of its candidates."""
    request = PlanRequest(strategies=model.strategies, batch_size=BATCH, optimizer=SGD)
    if options.quick:
        model = PlannedModel(QUICK_TASK, model.strategies[:2])
        request = replace(request, strategies=model.strategies, seconds=1.0)
    planned = plan(model.task, request)
    known = {str(one): one for one in candidates(this_machine(), model.strategies, SGD)}
    rate = partial(workloads.rate, model.task, epochs=MOST_EPOCHS, batch_size=BATCH, budget=f"{options.seconds}s")
    jobs = {row.what: partial(rate, known[row.what].strategy) for row in planned.rows if row.measured}
    rates = interleave(jobs, options.repeats)
    rows = {
        row.what: {
            "planned": row.rate,
            "measured": statistics.median(rates[row.what]),
            "least": min(rates[row.what]),
            "spread": spread(rates[row.what]),
        }
        for row in planned.rows
        if row.measured
    }
    best = max(rows.values(), key=lambda row: row["measured"])
    return {
        "first": planned.first.what,
        "planned_seconds": planned.seconds,
        "of_best": rows[planned.first.what]["measured"] / best["measured"],
        "due": min(OF_BEST, best["least"] / best["measured"]),
        "candidates": rows,
    }


def _figures(name: str, found: Json) -> list[Figure]:
    return [
        figure(
            f"{name}: the first of the plan, {found['first']}, relative to the best", found["of_best"], found["due"]
        ),
        figure(f"{name}: seconds of the plan", found["planned_seconds"], LONGEST, lower=True),
    ]


def _table(name: str, found: Json) -> Table:
    rows = [
        [what, number(row["planned"]), number(row["measured"]), f"{row['spread']:.0%}"]
        for what, row in found["candidates"].items()
    ]
    return Table(f"{name}: samples/s in the plan, and afterwards", ("", "in the plan", "afterwards", "+-"), rows)
