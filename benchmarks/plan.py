"""Samples per second of every candidate of a plan for this machine, predicted and measured, and the first
of the plan beside the best that was measured.

Each round has a plan of its own, since the machine changes. Nothing is kept from earlier runs; but from the second
round on, prices that the rounds before would have corrected (`plan --run`) are held against the measured rates too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from benchmarks.parts.timing import Figure, check_models, check_repeats, figure, finish, spread
from distbelief.cli.tables import number, show
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.lab.plan import trials
from distbelief.lab.plan.candidates import PLANNED, candidates
from distbelief.lab.plan.plan import TrainingPlan, plan, this_machine
from distbelief.lab.plan.pricing import PARTS, Terms
from distbelief.lab.plan.trials import PlanTrial
from distbelief.record.machine import machine
from distbelief.tasks import as_data, resolve

WITHIN, OF_BEST = 0.15, 0.95
"""How far a predicted rate may lie from the measured one, and what of the best the first of a plan is to reach."""
LONGEST = 40.0
"""Seconds in which the MLP is to be planned."""
WORKLOADS = "benchmarks.parts.workloads:"
BATCH, SGD = 64, optim("sgd", lr=0.01)


class PlannedModel(NamedTuple):
    """A model that is planned for."""

    task: str
    strategies: tuple[str, ...] = PLANNED


MODELS: Mapping[str, PlannedModel] = {
    "mlp": PlannedModel("mnist"),
    "lenet": PlannedModel(f"{WORKLOADS}lenet_short"),
    "split": PlannedModel(f"{WORKLOADS}mlp_wide_short", ("single",)),
}
QUICK = PlannedModel(f"{WORKLOADS}mlp_quick", ("single", "downpour"))


@dataclass(frozen=True)
class PlanBenchOptions:
    """Options of the benchmark plan."""

    models: tuple[str, ...] = tuple(MODELS)
    """mlp, lenet and split (784-2048-2048-10, whole and over two processes)."""
    repeats: int = 3
    """Rounds, in each of which there is a plan, and all of its candidates are trained with."""
    seconds: float = trials.TRIAL_SECONDS
    """That each is trained for at least, in whole epochs."""
    json: str | None = None
    """File to write the result to."""
    quick: bool = False
    """One short round: whether it runs, not how well it predicts."""
    quiet: bool = False
    """Print nothing."""
    QUICK: ClassVar[Mapping[str, object]] = {"models": ("mlp",), "repeats": 1, "seconds": 0.1}
    """Defaults with --quick."""


def run(options: PlanBenchOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: an unknown model, or a number of repeats that cannot be.
        DataError: there is no MNIST.
    """
    check_models(options.models, MODELS)
    check_repeats(options.repeats)
    facts = machine()
    models = {name: _of_model(QUICK if options.quick else MODELS[name], options) for name in options.models}
    figures = [one for name, found in models.items() for one in _figures(name, found)]
    result = {"bench": "plan", "machine": facts, "repeats": options.repeats, "models": models, "figures": figures}
    if not options.quiet:
        for name, found in models.items():
            _show(name, found)
    return finish(result, options)


def _of_model(model: PlannedModel, options: PlanBenchOptions) -> Json:
    """Rounds, in each of which there is a plan, and then a job of each of its candidates."""
    known = {str(one): one for one in candidates(this_machine(), model.strategies, SGD)}
    samples = len(as_data(resolve(model.task).train()))
    rounds: list[dict[str, PlanTrial]] = []
    firsts: list[str] = []
    took: list[float] = []
    for turn in range(options.repeats):
        begin = time.perf_counter()
        made = _planned(model)
        took.append(time.perf_counter() - begin)
        firsts.append(made.first.what)
        priced = {row.what: row.terms for row in made.rows if row.terms is not None}
        found = {}
        for what, terms in list(priced.items())[:: -1 if turn % 2 else 1]:
            epoch = samples / terms.samples_per_second
            measured = trials.run(model.task, known[what], BATCH, epoch, seconds=options.seconds)
            found[what] = trials.trial(known[what], made.task, BATCH, SGD, terms, measured)
        rounds.append({what: found[what] for what in priced})
    return {**_compared(rounds, firsts), "planned_seconds": statistics.median(took)}


def _planned(model: PlannedModel) -> TrainingPlan:
    """A plan that no trial has corrected."""
    with tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        file = f"{folder}/none.json"
        return plan(model.task, strategies=model.strategies, batch_size=BATCH, optimizer=SGD, calibration=file)


def _compared(rounds: Sequence[Mapping[str, PlanTrial]], firsts: Sequence[str]) -> Json:
    """Predicted and measured rates of each candidate, and the first of each plan beside the best of its round.

    Args:
        rounds: the trial of each candidate.
        firsts: what the plan of each round put first.
    """
    rows: dict[str, object] = {}
    for what in rounds[0]:
        seen = [one[what] for one in rounds if what in one]
        rates = [one.measured.samples_per_second for one in seen]
        rows[what] = {
            "predicted": statistics.median(one.predicted.samples_per_second for one in seen),
            "measured": statistics.median(rates),
            "spread": spread(rates),
            "error": statistics.median(1 / one.ratio - 1 for one in seen),
            "corrected_error": _corrected(rounds, what),
            "parts_predicted": _parts([one.predicted for one in seen]),
            "parts_measured": _parts([one.measured for one in seen]),
        }
    of_best = [
        found[first].measured.samples_per_second / max(one.measured.samples_per_second for one in found.values())
        for found, first in zip(rounds, firsts, strict=True)
    ]
    return {"firsts": [*firsts], "of_best": statistics.median(of_best), "candidates": rows}


def _corrected(rounds: Sequence[Mapping[str, PlanTrial]], what: str) -> float | None:
    """The median error of prices that the trials of the rounds before have corrected; None of the first round alone."""
    errors = []
    for count, found in enumerate(rounds[1:], 1):
        if one := found.get(what):
            before = [trial for earlier in rounds[:count] for trial in earlier.values()]
            factor, _ = trials.correction(before, one.alike)
            errors.append(factor / one.ratio - 1)
    return statistics.median(errors) if errors else None


def _parts(terms: Sequence[Terms]) -> dict[str, float]:
    """What a step is made of, the median of each part."""
    return {part: statistics.median(getattr(one, part) for one in terms) for part in PARTS}


def _figures(name: str, found: Json) -> list[Figure]:
    """What is promised."""
    rows = found["candidates"]
    return [
        *(figure(f"{name}, {what}: predicted samples/s, error", abs(row["error"]), WITHIN, lower=True)
            for what, row in rows.items()),
        *(figure(f"{name}, {what}: the same, corrected by a trial", abs(row["corrected_error"]), WITHIN, lower=True)
            for what, row in rows.items() if row["corrected_error"] is not None),
        figure(f"{name}: the first of the plan, of the best", found["of_best"], OF_BEST),
        *([figure("mlp: seconds of a plan", found["planned_seconds"], LONGEST, lower=True)] if name == "mlp" else []),
    ]  # fmt: skip


def _show(name: str, found: Json) -> None:
    rows = [
        [what, number(row["predicted"]), number(row["measured"]), f"{row['spread']:.0%}", f"{row['error']:+.0%}",
            *(f"{1e3 * row['parts_predicted'][part]:.3g} / {1e3 * row['parts_measured'][part]:.3g}" for part in PARTS)]
        for what, row in found["candidates"].items()
    ]  # fmt: skip
    columns = ("", "predicted", "measured", "+-", "error", *PARTS)
    show(f"{name}: samples/s predicted and measured; parts of a step in ms, both", columns, rows)
