"""Trials: one run of one arm with one seed, its record, the measurement of its model, and statistics of several."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy
import torch
from safetensors.torch import load_file

from distbelief.core import records
from distbelief.core.outcomes import Outcome
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.lab.study.definition import TARGETS, Target, parse_target
from distbelief.record.checkpoints import read_manifest
from distbelief.record.folder import RunFolder
from distbelief.record.metrics import read_metrics
from distbelief.record.restore import load_weights
from distbelief.record.summary import PARTS, moved
from distbelief.tasks import Task
from distbelief.tasks.flat import layout_of
from distbelief.tasks.worker import build_model, load, measure

MISSED = math.inf
"""The time of a trial that did not reach the target."""
RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A ratio, and the bounds between which it lies with a confidence of 95 %."""

    low: float
    ratio: float
    high: float


def median(values: Sequence[float]) -> float:
    """The median, in which a miss is infinite; so more than half must reach a target for it to be finite.

    >>> median([3.0, 1.0, MISSED]), median([1.0, MISSED, MISSED]), median([1.0, MISSED])
    (3.0, inf, inf)
    """
    return statistics.median(values) if values else math.nan


def ratio_of_medians(
    baseline: Sequence[float], times: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The speed-up, as the ratio of the medians, with its percentile bootstrap interval (Efron 1979).

    Each side's trials are drawn anew, with replacement. A draw in which neither side reached the target counts as 0
    for the lower bound, and as infinite for the upper.

    >>> ratio_of_medians([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    Interval(low=2.0, ratio=2.0, high=2.0)
    """
    if not baseline or not times:
        return Interval(math.nan, math.nan, math.nan)
    chance = numpy.random.default_rng(seed)
    ours, theirs = (numpy.median(chance.choice(side, (resamples, len(side))), axis=1) for side in (times, baseline))
    with numpy.errstate(invalid="ignore"):
        drawn, ratio = theirs / ours, numpy.divide(median(baseline), median(times))
    tail = (1 - CONFIDENCE) / 2
    # no value between two draws: that of a finite one and an infinite one is none
    low = numpy.quantile(numpy.where(numpy.isnan(drawn), 0.0, drawn), tail, method="lower")
    high = numpy.quantile(numpy.where(numpy.isnan(drawn), math.inf, drawn), 1 - tail, method="higher")
    return Interval(float(low), float(ratio), float(high))


DRAWS = 20
"""Minibatches whose gradients are compared with the whole one."""
PASSED = 1000
"""Minibatches over which the size of each parameter's gradient is measured, at most."""


SHRUNK = ("bytes", "dense_bytes", "ratio", "dense_error", "test_error")
"""What is kept of a compression: of the file, of the values as they were, their ratio, and errors in percent."""


class Point(msgspec.Struct, frozen=True):
    """The model at one moment of a run."""

    seconds: float
    """Of training, till the parameters were kept."""
    epochs: float
    samples: int
    steps: int
    loss: float
    """On the test set, as `accuracy` (0 to 1)."""
    accuracy: float | None
    """None of a task that has none."""
    training_loss: float | None = None
    """On the training set, where a target is of that; of any run, the mean of its minibatches since the last point."""

    def holds(self, target: Target) -> bool:
        """Return whether the model is as good as a target."""
        of, value = parse_target(target)
        if of == TARGETS[-1]:
            return self.accuracy is not None and self.accuracy >= value
        loss = self.loss if of == TARGETS[1] else self.training_loss
        return loss is not None and loss <= value


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the jobs of a trial, as `of_result` has them."""

    outcome: str = str(Outcome.DONE)
    reason: str = ""
    """Why it could not be run, or failed; else how it ended."""
    replicas: int = 1
    seconds: float = 0.0
    epochs: int = 0
    steps: int = 0
    samples: int = 0
    updates: int = 0
    bytes: int = 0
    """Moved to train."""
    bytes_by_kind: dict[str, int] = {}
    """Bytes of each kind among these: push, fetch, all_reduce, partitions."""
    staleness: dict[str, int] = {}
    """So many pushes of each staleness."""
    parts: dict[str, float] = {}
    """Seconds of a step, by `PARTS`; empty where they are not known."""
    losses: list[tuple[float, float]] = []
    """Seconds, and the mean loss of the training minibatches since."""


class Trial(JobFigures, frozen=True, kw_only=True):
    """One run of an arm."""

    arm: str
    seed: int
    value: float | None = None
    """Value of the tuned option."""
    tuning: bool = False
    """True if it only helps to choose the value; no figure is of it."""
    command: str
    task: str
    strategy: str
    place: str
    busy: float | None = None
    """The part of this machine that others took, just before and after; not known of a simulated one."""
    points: list[Point] = []
    cosine: float | None = None
    """Of the gradient of a minibatch and that of the whole training set, at the end: the mean of some minibatches."""
    uneven: float | None = None
    """Its `unevenness`, of a model that others begin with."""
    shrunk: dict[str, float] = {}
    """By `SHRUNK`, of a trial that compresses what another has trained."""

    @property
    def failed(self) -> bool:
        """Whether there is nothing to be seen of it."""
        return not (self.points or self.shrunk)

    def held(self, target: Target) -> Point | None:
        """The first of two points in a row that hold a target; None where there are none."""
        pairs = itertools.pairwise(self.points)
        return next((one for one, after in pairs if one.holds(target) and after.holds(target)), None)

    def until(self, target: Target, what: str = "seconds") -> float:
        """Seconds, or another of a point's figures, till it held a target; infinite where it never did."""
        point = self.held(target)
        return getattr(point, what) if point else MISSED

    @property
    def accuracy(self) -> float | None:
        """At the end; None where nothing is to be seen of it."""
        return self.points[-1].accuracy if self.points else None


def of_result(*results: Json) -> Json:
    """What a trial keeps of what `result.json` holds: of several runs, one after another, what they add up to; the
    outcome is that of the first that was not done.
    """
    first = next((one for one in results if one["outcome"] != Outcome.DONE), results[0])
    rows = [row for row in results[0]["history"] if row["train_loss"] is not None]
    staleness = sum((Counter(one["staleness"]["histogram"]) for one in results), Counter[str]())
    replicas = [replica for one in results for replica in one["per_replica"]]
    return {
        **{name: first[name] for name in ("outcome", "reason", "replicas")},
        **{name: sum(one[name] for one in results) for name in ("seconds", "epochs", "steps", "samples", "updates")},
        "bytes": sum(sum(moved(one["bytes"]).values()) for one in results),
        "bytes_by_kind": {kind: sum(moved(one["bytes"])[kind] for one in results) for kind in moved({})},
        "staleness": dict(staleness),
        "losses": [(row["seconds"], row["train_loss"]) for row in rows],
        "parts": _parts([replica["times"] for replica in replicas if replica.get("times")]),
    }


def _parts(times: Sequence[Json]) -> dict[str, float]:
    """Of all replicas together.

    >>> _parts([{"steps": 2, "compute": 3.0, "update": 1.0, "communicate": 0.0, "wait": 2.0}])["compute"]
    1.5
    """
    steps = sum(one["steps"] for one in times)
    return {name: sum(one[name] for one in times) / steps for name in PARTS} if steps else {}


class Farm(torch.nn.Module):
    """Several models whose outputs are averaged, as `distbelief predict RUN...` does."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, inputs: object) -> object:
        """The mean of what they answer; of one model, its answer."""
        outputs = [model(inputs) for model in self.models]
        return outputs[0] if len(outputs) == 1 else sum(outputs) / len(outputs)


def measure_points(runs: Sequence[Path], task: Task, seed: int, targets: Sequence[Target] = ()) -> list[Point]:
    """Measure every checkpoint of a run, after its end: so that it cost the job nothing. Of several runs, one after
    another, their mean prediction at their first checkpoints, their second ones, and so on, and at their last ones; at
    the time, samples and steps of all of them together.

    Args:
        runs: whose checkpoints are there.
        task: that they train.
        seed: of their models.
        targets: of the study; the loss on the training set is measured where one is of that.

    Raises:
        CheckpointError: one is missing or spoilt.
        UsageError: the task has no accuracy, and that is what is asked for.
    """
    if task.test is None:
        return []
    wanted = {parse_target(target)[0] for target in targets}
    data, trained_on = load(task, "test"), load(task, "training") if TARGETS[0] in wanted else None
    on_training = dataclasses.replace(task, test=lambda: trained_on) if trained_on is not None else None
    task = dataclasses.replace(task, test=lambda: data)
    farm = Farm([build_model(task, seed, "cpu") for _ in runs])
    layout = layout_of(farm.models[0])
    kept = [_kept(RunFolder(run)) for run in runs]
    points = []
    for moments in _together([own for own, _ in kept]):
        for model, moment in zip(farm.models, moments, strict=True):
            model.load_state_dict(load_weights(moment.folder, layout))
        found = measure(task, farm)
        if found.accuracy is None and (TARGETS[-1] in wanted or not wanted):
            raise UsageError(f"task {task.reference!r} has no accuracy to compare ways to train by: give it a metric")
        seconds, samples, steps = (
            sum(getattr(one, name) for one in moments) for name in ("seconds", "samples", "steps")
        )
        loss = measure(on_training, farm).loss if on_training else None
        points.append(Point(seconds, samples / max(kept[0][1], 1), samples, steps, found.loss, found.accuracy, loss))
    return points


def cosine(run: Path, task: Task, batch_size: int, seed: int) -> float:
    """How alike the gradient of a minibatch and the whole one are, in the last model of a run: the mean cosine of
    `DRAWS` minibatches, drawn without replacement each.
    """
    gradient, samples = _gradients(run, task, seed)
    chance = torch.Generator().manual_seed(seed)
    whole = gradient(torch.arange(samples))
    drawn = [gradient(torch.randperm(samples, generator=chance)[:batch_size]) for _ in range(DRAWS)]
    return float(sum(torch.cosine_similarity(one, whole, dim=0) for one in drawn)) / DRAWS


def unevenness(run: Path, task: Task, batch_size: int, seed: int) -> float:
    """Measure how much gradients differ in size over the parameters of a run's last model: the root mean square of the
    sizes over their mean, as which the bounds on the regrets of gradient descent and of Adagrad differ but for
    constants, of parameters in a cube (after Duchi et al. 2011). A parameter's size is its root mean square over the
    minibatches of an epoch, `PASSED` of them at most.
    """
    gradient, samples = _gradients(run, task, seed)
    batches = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).split(batch_size)[:PASSED]
    squares = torch.zeros(())
    for numbers in batches:
        squares = squares + gradient(numbers).double().square()
    return float(squares.mean().sqrt() / squares.sqrt().mean())


def _gradients(run: Path, task: Task, seed: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """Return the gradient of samples by their numbers, in the last model of a run, and how many samples there are."""
    data, model = load(task, "training"), build_model(task, seed, "cpu")
    model.load_state_dict(load_file(run / "model.safetensors"))

    def gradient(numbers: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        inputs, targets = data.batch(numbers)
        task.loss(model(inputs), targets).backward()
        return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    return gradient, len(data)


@dataclass(frozen=True)
class _Moment:
    """A checkpoint of a run."""

    folder: Path
    seconds: float
    """Of training, till it was made."""
    samples: int
    steps: int


def _kept(run: RunFolder) -> tuple[list[_Moment], int]:
    """The checkpoints of a run in order, and the samples of an epoch."""
    made: list[_Moment] = []
    began, per_epoch, steps = 0.0, 0, 0
    for seconds, record in read_metrics(run.metrics):
        match record:
            case records.Started():
                began, per_epoch = seconds, record.samples_per_epoch
            case records.Stepped():
                steps += record.steps
            case records.Checkpointed(number=number, error=""):
                folder = run.path / "checkpoints" / f"{number:06d}"
                made.append(_Moment(folder, seconds - began, read_manifest(folder).samples, steps))
    return made, per_epoch


def _together(kept: Sequence[Sequence[_Moment]]) -> list[tuple[_Moment, ...]]:
    """The first of each, the second, and so on, and the last of each; none, where one has none."""
    if not all(kept):
        return []
    return [*zip(*(own[:-1] for own in kept), strict=False), tuple(own[-1] for own in kept)]


def tidy(run: Path) -> None:
    """Leave of a run folder what can be read again: its settings, metrics, result and last model."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    for events in run.glob("events.out.tfevents.*"):
        events.unlink(missing_ok=True)
