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
from distbelief.core.records import Json, Outcome
from distbelief.errors import UsageError
from distbelief.lab.study.definition import TARGETS, Target, parse_target
from distbelief.record.checkpoints import read_manifest
from distbelief.record.folder import RunFolder
from distbelief.record.live import told_of
from distbelief.record.metrics import read_metrics
from distbelief.record.restore import load_weights
from distbelief.record.summary import PARTS, moved
from distbelief.tasks import Task
from distbelief.tasks.flat import layout_of
from distbelief.tasks.worker import build_model, load, measure

MISSED = math.inf
"""Time of a trial that missed the target."""
RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """Ratio with the bounds of its confidence interval of 95 %."""

    low: float
    ratio: float
    high: float


def median(values: Sequence[float]) -> float:
    """Return the median, infinite unless more than half of the values are finite.

    >>> median([3.0, 1.0, MISSED]), median([1.0, MISSED, MISSED]), median([1.0, MISSED])
    (3.0, inf, inf)
    """
    return statistics.median(values) if values else math.nan


def ratio_of_medians(baseline: Sequence[float], times: Sequence[float]) -> Interval:
    """Return the speed-up as the ratio of medians, with its percentile bootstrap interval (Efron 1979).

    Each side's trials are drawn anew with replacement. A draw in which neither side reached the target counts as 0 for
    the lower bound, and as infinite for the upper.

    >>> ratio_of_medians([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    Interval(low=2.0, ratio=2.0, high=2.0)
    """
    if not baseline or not times:
        return Interval(math.nan, math.nan, math.nan)
    chance = numpy.random.default_rng(0)
    ours, theirs = (numpy.median(chance.choice(side, (RESAMPLES, len(side))), axis=1) for side in (times, baseline))
    with numpy.errstate(invalid="ignore"):
        drawn, ratio = theirs / ours, numpy.divide(median(baseline), median(times))
    tail = (1 - CONFIDENCE) / 2
    # without interpolation, which fails between finite and infinite draws
    low = numpy.quantile(numpy.where(numpy.isnan(drawn), 0.0, drawn), tail, method="lower")
    high = numpy.quantile(numpy.where(numpy.isnan(drawn), math.inf, drawn), 1 - tail, method="higher")
    return Interval(float(low), float(ratio), float(high))


DRAWS = 20
"""Minibatches whose gradients are compared with that of all data."""
PASSED = 1000
"""Most minibatches that measure the size of each parameter's gradient."""
SHRUNK = ("bytes", "dense_bytes", "ratio", "dense_error", "test_error")
"""Record of a compression: bytes of the file, of the values before, their ratio, and errors in percent."""


class Point(msgspec.Struct, frozen=True):
    """Model at one moment of a run."""

    seconds: float
    epochs: float
    samples: int
    steps: int
    loss: float
    accuracy: float | None
    """Accuracy on the test set (0 to 1), if the task has one."""
    training_loss: float | None = None
    """Loss on the training set, if a target names it; in an imported run, the mean since the last point."""

    def holds(self, target: Target) -> bool:
        """Return whether the model meets a target."""
        of, value = parse_target(target)
        if of == TARGETS[-1]:
            return self.accuracy is not None and self.accuracy >= value
        loss = self.loss if of == TARGETS[1] else self.training_loss
        return loss is not None and loss <= value


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a trial's jobs, as `of_result` returns them."""

    outcome: str = str(Outcome.DONE)
    reason: str = ""
    replicas: int = 1
    seconds: float = 0.0
    epochs: int = 0
    steps: int = 0
    samples: int = 0
    updates: int = 0
    bytes: int = 0
    bytes_by_kind: dict[str, int] = {}
    staleness: dict[str, int] = {}
    parts: dict[str, float] = {}
    """Seconds of a step by `PARTS`; empty if unknown."""
    diagnosis: list[str] = []
    """Sentences on what is probably wrong."""
    losses: list[tuple[float, float]] = []
    """Seconds of each moment, and the mean training loss since the one before."""


class Trial(JobFigures, frozen=True, kw_only=True):
    """One run of an arm."""

    arm: str
    seed: int
    value: float | None = None
    tuning: bool = False
    """True if it only helps to choose that value."""
    command: str
    task: str
    strategy: str
    place: str
    busy: float | None = None
    """Share of this machine that others took just before and after; None if simulated."""
    points: list[Point] = []
    cosine: float | None = None
    uneven: float | None = None
    shrunk: dict[str, float] = {}

    @property
    def failed(self) -> bool:
        """Return whether it has no result."""
        return not (self.points or self.shrunk)

    def held(self, target: Target) -> Point | None:
        """Return the first of two consecutive points that meet a target, if any."""
        pairs = itertools.pairwise(self.points)
        return next((point for point, after in pairs if point.holds(target) and after.holds(target)), None)

    def until(self, target: Target, what: str = "seconds") -> float:
        """Return the seconds, or another figure, of the point that met a target; infinite if none did."""
        point = self.held(target)
        return getattr(point, what) if point else MISSED

    @property
    def accuracy(self) -> float | None:
        """Return the final accuracy, if known."""
        return self.points[-1].accuracy if self.points else None


def of_result(*results: Json) -> Json:
    """Return a trial's figures from `result.json`, summed over runs, with the outcome of the first unfinished one."""
    first = next((result for result in results if result["outcome"] != Outcome.DONE), results[0])
    rows = [row for row in results[0]["history"] if row["train_loss"] is not None]
    staleness = sum((Counter(result["staleness"]["histogram"]) for result in results), Counter[str]())
    replicas = [replica for result in results for replica in result["per_replica"]]
    return {
        **{name: first[name] for name in ("outcome", "reason", "replicas")},
        **{
            name: sum(result[name] for result in results)
            for name in ("seconds", "epochs", "steps", "samples", "updates")
        },
        "bytes": sum(sum(moved(result["bytes"]).values()) for result in results),
        "bytes_by_kind": {kind: sum(moved(result["bytes"])[kind] for result in results) for kind in moved({})},
        "staleness": dict(staleness),
        "diagnosis": [told_of(found) for result in results for found in result.get("diagnosis", [])],
        "losses": [(row["seconds"], row["train_loss"]) for row in rows],
        "parts": _parts([replica["times"] for replica in replicas if replica.get("times")]),
    }


def _parts(times: Sequence[Json]) -> dict[str, float]:
    """Return the mean parts of all replicas' steps.

    >>> _parts([{"steps": 2, "compute": 3.0, "update": 1.0, "communicate": 0.0, "wait": 2.0}])["compute"]
    1.5
    """
    steps = sum(replica["steps"] for replica in times)
    return {name: sum(replica[name] for replica in times) / steps for name in PARTS} if steps else {}


class Farm(torch.nn.Module):
    """Several models with averaged outputs, as in `distbelief predict RUN...`."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, inputs: object) -> object:
        """Return the mean output."""
        outputs = [model(inputs) for model in self.models]
        return outputs[0] if len(outputs) == 1 else sum(outputs) / len(outputs)


def measure_points(runs: Sequence[Path], task: Task, seed: int, targets: Sequence[Target] = ()) -> list[Point]:
    """Measure every checkpoint of a run after its end, which costs the job no time.

    Several runs count as one after another. Their mean prediction is measured at their first checkpoints, their second
    ones, and so on to their last ones. Time, samples and steps are sums.
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
    for moments in _together([moments for moments, _ in kept]):
        for model, moment in zip(farm.models, moments, strict=True):
            model.load_state_dict(load_weights(moment.folder, layout))
        figures = measure(task, farm)
        if figures.accuracy is None and (TARGETS[-1] in wanted or not wanted):
            raise UsageError(f"task {task.reference!r} has no accuracy to compare arms by: give it a metric")
        seconds, samples, steps = (
            sum(getattr(moment, name) for moment in moments) for name in ("seconds", "samples", "steps")
        )
        loss = measure(on_training, farm).loss if on_training else None
        points.append(
            Point(seconds, samples / max(kept[0][1], 1), samples, steps, figures.loss, figures.accuracy, loss)
        )
    return points


def cosine(run: Path, task: Task, batch_size: int, seed: int) -> float:
    """Return the mean cosine of the gradients of `DRAWS` minibatches and of the whole set, in a run's last model."""
    gradient, samples = _gradients(run, task, seed)
    chance = torch.Generator().manual_seed(seed)
    whole = gradient(torch.arange(samples))
    drawn = [gradient(torch.randperm(samples, generator=chance)[:batch_size]) for _ in range(DRAWS)]
    return float(sum(torch.cosine_similarity(each, whole, dim=0) for each in drawn)) / DRAWS


def unevenness(run: Path, task: Task, batch_size: int, seed: int) -> float:
    """Return how much gradients differ in size over the parameters of a run's last model.

    It is the root mean square of the sizes divided by their mean. Up to constants, this is the ratio of the regret
    bounds of gradient descent and Adagrad for parameters in a cube (after Duchi et al. 2011). A parameter's size is its
    root mean square over at most `PASSED` minibatches.
    """
    gradient, samples = _gradients(run, task, seed)
    batches = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).split(batch_size)[:PASSED]
    squares = torch.zeros(())
    for numbers in batches:
        squares = squares + gradient(numbers).double().square()
    return float(squares.mean().sqrt() / squares.sqrt().mean())


def _gradients(run: Path, task: Task, seed: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    data, model = load(task, "training"), build_model(task, seed, "cpu")
    model.load_state_dict(load_file(run / "model.safetensors"))

    def gradient(numbers: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        inputs, targets = data.batch(numbers)
        task.loss(model(inputs), targets).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    return gradient, len(data)


@dataclass(frozen=True)
class _Moment:
    folder: Path
    seconds: float
    samples: int
    steps: int


def _kept(run: RunFolder) -> tuple[list[_Moment], int]:
    """Return the checkpoints of a run in order, and the samples of an epoch."""
    moments: list[_Moment] = []
    began, per_epoch, steps = 0.0, 0, 0
    for seconds, record in read_metrics(run.metrics):
        match record:
            case records.Started():
                began, per_epoch = seconds, record.samples_per_epoch
            case records.Stepped():
                steps += record.steps
            case records.Checkpointed(number=number, error=""):
                folder = run.path / "checkpoints" / f"{number:06d}"
                moments.append(_Moment(folder, seconds - began, read_manifest(folder).samples, steps))
    return moments, per_epoch


def _together(kept: Sequence[Sequence[_Moment]]) -> list[tuple[_Moment, ...]]:
    if not all(kept):
        return []
    return [*zip(*(moments[:-1] for moments in kept), strict=False), tuple(moments[-1] for moments in kept)]


def tidy(run: Path) -> None:
    """Delete the checkpoints and event files of a run folder, and keep settings, metrics, result and last model."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    for events in run.glob("events.out.tfevents.*"):
        events.unlink(missing_ok=True)
