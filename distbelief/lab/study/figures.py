"""Figures of each arm from its trials, and their tables."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

import msgspec
from rich.console import Console
from rich.table import Table

from distbelief.core.records import Json
from distbelief.lab import number
from distbelief.lab.study.claims import Judged, momentum
from distbelief.lab.study.definition import TARGETS, Arm, Study, Target, parse_target
from distbelief.lab.study.trials import SHRUNK, Interval, Trial, median, ratio_of_medians
from distbelief.record.summary import PARTS, moved

BUSY = 0.1
"""Least share of other work at which a machine counts as busy."""
WIDTH = 100
HOW = {"local": "measured", "simulated": "simulated"}


class Reached(msgspec.Struct, frozen=True):
    """Success of an arm at one target."""

    target: Target
    reached: int
    of: int
    seconds: list[float]
    """Seconds of each trial in the order of seeds; a miss is infinite, null in JSON."""
    median: float
    speed_up: Interval
    seconds_per_step: float
    """Hardware efficiency in the median trial."""
    steps: float
    """Statistical efficiency: the median; a miss counts as infinite."""
    samples: float
    epochs: float
    fewer_epochs: Interval


class ProblemFigures(msgspec.Struct, frozen=True):
    """Figures of an arm on its problem, beside those of the observed way with the same number of replicas."""

    problem: str
    loss: float
    way: str
    replicas: int
    value: float | None
    seconds: list[float]
    """Seconds of each trial to the loss, in the order of seeds; a miss is infinite."""
    samples: float
    longer: Interval
    staleness: float
    last: float
    uneven: float

    @property
    def gain(self) -> str:
        """Return the ratio to the observed way's time as text."""
        return "never" if self.longer.ratio == math.inf else told_interval(self.longer)

    def row(self) -> list[str]:
        """Return its cells in a table below `PROBLEM_HEAD`."""
        best = "-" if self.value is None else f"{self.value:g}"
        reached = f"{sum(map(math.isfinite, self.seconds))} of {len(self.seconds)}"
        figures = map(number, (self.staleness, self.last, self.samples, median(self.seconds)))
        return [self.way, str(self.replicas), best, *figures, reached, self.gain]


PROBLEM_HEAD = ["way", "replicas", "best", "staleness", "last loss", "samples", "seconds", "reached", "times as long"]


class Medians(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of an arm's successful trials; `MEDIANS` defines them."""

    accuracy: float
    seconds: float
    samples_per_second: float
    seconds_per_step: float
    seconds_per_update: float
    bytes_per_step: float
    bytes_by_kind: dict[str, float]
    staleness: float
    most_staleness: float
    momentum: float
    cosine: float


MEDIANS: Mapping[str, Callable[[Trial], float | None]] = {
    "accuracy": lambda trial: trial.accuracy,
    "seconds": lambda trial: trial.seconds,
    "samples_per_second": lambda trial: _per(trial.samples, trial.seconds),
    "seconds_per_step": lambda trial: _per(trial.seconds, trial.steps),
    "seconds_per_update": lambda trial: _per(trial.seconds, trial.updates),
    "bytes_per_step": lambda trial: _per(trial.bytes, trial.steps),
    "staleness": lambda trial: _mean(trial.staleness),
    "most_staleness": lambda trial: max(map(int, trial.staleness), default=0),
    "momentum": lambda trial: momentum(trial.staleness),
    "cosine": lambda trial: trial.cosine,
}
"""Figure of a trial, None if unknown, by the name of its median."""


class ArmFigures(Medians, frozen=True, kw_only=True):
    """Figures of an arm over all its trials."""

    name: str
    task: str
    strategy: str
    place: str
    baseline: str
    command: str
    value: float | None
    replicas: int
    trials: int
    failed: int
    reason: str
    parts: dict[str, float]
    busy: float
    """Largest share of the machine that other work took."""
    targets: list[Reached]

    @property
    def accuracy_with_failed(self) -> float:
        """Return the final accuracy; failed trials count as 0."""
        return 0.0 if self.failed > self.trials - self.failed else self.accuracy

    def at(self, target: Target) -> Reached:
        """Return the success at a target."""
        return next(reached for reached in self.targets if reached.target == target)


class ShrunkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a compressing arm over its seeds."""

    name: str
    of: str
    trials: int
    reason: str
    means: dict[str, float]
    spreads: dict[str, float]

    def row(self) -> list[str]:
        """Return its cells in a table below `SHRUNK_HEAD`."""
        if not self.means:
            return [self.name, str(self.trials), self.reason, "", "", ""]
        errors = [
            f"{self.means[name]:.2f} ± {self.spreads[name]:.2f}" if name in self.means else "-"
            for name in ("dense_error", "test_error")
        ]
        return [self.name, str(self.trials), *errors, f"{self.means['bytes']:,.0f}", f"{self.means['ratio']:.1f}"]


SHRUNK_HEAD = ["compressed", "trials", "dense error %", "error %", "bytes", "times fewer"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a study."""

    study: Study
    machine: Json
    left: int
    arms: list[ArmFigures]
    trials: list[Trial]
    """Trials that count, without those that chose values."""
    shrunk: list[ShrunkFigures] = []
    problems: list[ProblemFigures] = []
    sentences: list[str] = []
    claims: list[Judged] = []
    cost: str = ""

    def arm(self, name: str) -> ArmFigures:
        """Return the figures of an arm."""
        return next(arm for arm in self.arms if arm.name == name)

    def groups(self) -> list[list[ArmFigures]]:
        """Return arms by baseline; those of the study's own baseline come first."""
        groups: dict[str, list[ArmFigures]] = {self.study.baseline: []}
        for arm in self.arms:
            groups.setdefault(arm.baseline, []).append(arm)
        return [group for group in groups.values() if group]

    def problem_tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield a heading and a table of each problem."""
        for problem in dict.fromkeys(figures.problem for figures in self.problems):
            alike = [figures for figures in self.problems if figures.problem == problem]
            heading = f"{problem}: to a loss of {alike[0].loss:g}; unevenness of gradients {number(alike[0].uneven)}"
            yield heading, [PROBLEM_HEAD, *(figures.row() for figures in alike)]

    def lines(self) -> list[str]:
        """Return the tables, sentences and claims as lines of text."""
        lines: list[str] = []
        for heading, rows in self.problem_tables():
            lines += [heading, *_aligned(rows), ""]
        for group in self.groups() if not self.problems else ():
            target = highest(self.study.targets, group) or next(reversed(self.study.targets), None)
            to = f", to {named(target)}; speed-up over {group[0].baseline}" if target else ":"
            last = [target] if target else []
            lines.append(kind(group) + to)
            for rows in tables(group, last):
                lines += [*_aligned(rows), ""]
        if self.shrunk:
            lines += [*_aligned([SHRUNK_HEAD, *(row.row() for row in self.shrunk)]), ""]
        lines += self.sentences
        if self.claims:
            lines += ["", *(row.line() for row in self.claims)]
        lines += [self.cost] if self.cost else []
        return lines + ([f"{self.left} trials are still to be run"] if self.left else [])


def table(group: Sequence[ArmFigures], targets: Sequence[Target]) -> list[list[str]]:
    """Return a head, and a row for each arm: its speed, and its time to each target."""
    names = [f" {named(target)}" for target in targets] if targets[1:] else [""] * len(targets)
    heads = [f"{head}{name}" for name in names for head in ("seconds", "reached", "speed-up")]
    shares = efficiencies(group)
    rows = [["arm", "trials", "accuracy", "samples/s", *["efficiency"] * bool(shares), *heads]]
    for arm in group:
        failed = "failed" if arm.failed and arm.failed == arm.trials else ""
        row = [arm.name, str(arm.trials), failed or percent(arm.accuracy), number(arm.samples_per_second)]
        row += [f"{100 * shares[arm.name]:.0f} %" if arm.name in shares else "-"] * bool(shares)
        for at in map(arm.at, targets):
            row += [number(at.median), f"{at.reached} of {at.of}", told_interval(at.speed_up)]
        rows.append(row)
    return rows


def tables(group: Sequence[ArmFigures], targets: Sequence[Target]) -> list[list[list[str]]]:
    """Return the tables of some arms; the one of epochs and bytes is left out if it has no columns."""
    more = epochs_table(group, targets)
    return [table(group, targets), *[more] * (len(more[0]) > 1)]


def epochs_table(group: Sequence[ArmFigures], targets: Sequence[Target]) -> list[list[str]]:
    """Return a head, and a row for each arm: epochs to each target, and bytes of a step."""
    names = [f" {named(target)}" for target in targets] if targets[1:] else [""] * len(targets)
    kinds = [kind for kind in moved({}) if any(arm.bytes_by_kind[kind] > 0 for arm in group)]
    heads = [f"{head}{name}" for name in names for head in ("epochs", "speed-up in epochs")]
    rows = [["arm", *heads, *(f"{kind.replace('_', '-')} B/step" for kind in kinds)]]
    for arm in group:
        standing = [(number(at.epochs), told_interval(at.fewer_epochs)) for at in map(arm.at, targets)]
        sizes = [number(arm.bytes_by_kind[kind]) for kind in kinds]
        rows.append([arm.name, *(cell for cells in standing for cell in cells), *sizes])
    return rows


def figures(study: Study, trials: Sequence[Trial], arm: Arm) -> ArmFigures:
    """Sum up the trials of an arm."""
    base = baseline_of(study, arm)
    every, theirs = (
        sorted((trial for trial in trials if trial.arm == name), key=lambda trial: trial.seed)
        for name in (arm.name, base.name)
    )
    succeeded, failed = ([trial for trial in every if trial.failed == broken] for broken in (False, True))
    known = {name: [value for trial in succeeded if (value := of(trial)) is not None] for name, of in MEDIANS.items()}
    return ArmFigures(
        name=arm.name,
        task=arm.task,
        strategy=arm.strategy,
        place=arm.place,
        baseline=base.name,
        command=every[0].command if every else "",
        value=every[0].value if every else None,
        replicas=succeeded[0].replicas if succeeded else 0,
        trials=len(every),
        failed=len(failed),
        reason=failed[0].reason if failed else "",
        bytes_by_kind={
            kind: median([trial.bytes_by_kind.get(kind, 0) / max(1, trial.steps) for trial in succeeded])
            for kind in moved({})
        },
        parts={name: median([trial.parts[name] for trial in succeeded]) for name in PARTS}
        if succeeded and succeeded[0].parts
        else {},
        busy=max((trial.busy for trial in succeeded if trial.busy is not None), default=math.nan),
        targets=[_reached(target, every, theirs) for target in study.targets],
        **{name: median(values) for name, values in known.items()},
    )


def shrunk_figures(trials: Sequence[Trial], arm: Arm) -> ShrunkFigures:
    """Sum up the trials of a compressing arm."""
    counted = [trial for trial in trials if trial.arm == arm.name]
    known = {
        name: values for name in SHRUNK if (values := [trial.shrunk[name] for trial in counted if name in trial.shrunk])
    }
    reason = next((trial.reason for trial in counted if trial.failed), "")
    means = {name: fmean(values) for name, values in known.items()}
    spreads = {name: stdev(values) if len(values) > 1 else 0.0 for name, values in known.items()}
    return ShrunkFigures(
        name=arm.name, of=arm.compresses, trials=len(counted), reason=reason, means=means, spreads=spreads
    )


def kind(group: Sequence[ArmFigures]) -> str:
    """Return the task of compared arms, and how their figures are known."""
    return f"{group[0].task}, {HOW[group[0].place]}"


def highest(targets: Sequence[Target], arms: Sequence[ArmFigures]) -> Target | None:
    """Return the hardest target that any of these arms reaches in the median, if any."""
    return next(
        (target for target in reversed(targets) if any(math.isfinite(arm.at(target).median) for arm in arms)), None
    )


def without_replicas(name: str) -> str:
    """Return the name of an arm without its number of replicas.

    >>> without_replicas("downpour, replicas 4, lr 0.1"), without_replicas("serial")
    ('downpour, lr 0.1', 'serial')
    """
    return re.sub(r", replicas \d+(?=,|$)", "", name)


def scaled(arms: Sequence[ArmFigures]) -> Iterator[list[ArmFigures]]:
    """Yield groups of arms that differ only in their number of replicas, in ascending order."""
    alike: dict[tuple[str, str, str], list[ArmFigures]] = {}
    for arm in arms:
        if math.isfinite(arm.samples_per_second) and without_replicas(arm.name) != arm.name:
            alike.setdefault((without_replicas(arm.name), arm.task, arm.place), []).append(arm)
    yield from (sorted(several, key=lambda trial: trial.replicas) for several in alike.values() if len(several) > 1)


def efficiency(rate: float, replicas: int, alone: float) -> float:
    """Return samples a second of some replicas over as many times those of one.

    >>> efficiency(300.0, 4, 100.0)
    0.75
    """
    return rate / (replicas * alone)


def efficiencies(arms: Sequence[ArmFigures]) -> dict[str, float]:
    """Return the efficiency of each arm that also ran with one replica."""
    with_one = [several for several in scaled(arms) if several[0].replicas == 1 and several[0].samples_per_second]
    return {
        arm.name: efficiency(arm.samples_per_second, arm.replicas, several[0].samples_per_second)
        for several in with_one
        for arm in several
    }


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows[1:]:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=WIDTH, markup=False, emoji=False, highlight=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _per(amount: float, of: float) -> float | None:
    return amount / of if of else None


def _mean(histogram: dict[str, int]) -> float:
    count = sum(histogram.values())
    return sum(int(staleness) * times for staleness, times in histogram.items()) / count if count else 0.0


def _reached(target: Target, trials: Sequence[Trial], theirs: Sequence[Trial]) -> Reached:
    """Return the success of an arm at a target, beside its baseline; a failed trial is a miss."""

    def less(what: str) -> Interval:
        amounts, base = ([trial.until(target, what) for trial in side] for side in (trials, theirs))
        # trials compared with themselves have ratio one; two random draws would differ
        same = trials == theirs and math.isfinite(median(amounts))
        return Interval(1.0, 1.0, 1.0) if same else ratio_of_medians(base, amounts)

    points, seconds = [trial.held(target) for trial in trials], [trial.until(target) for trial in trials]
    a_step = median([point.seconds / point.steps for point in points if point and point.steps])
    steps, samples, epochs = (
        median([trial.until(target, name) for trial in trials]) for name in ("steps", "samples", "epochs")
    )
    reached = sum(map(math.isfinite, seconds))
    counts = target, reached, len(seconds), seconds, median(seconds), less("seconds")
    return Reached(*counts, a_step, steps, samples, epochs, less("epochs"))


def baseline_of(study: Study, arm: Arm) -> Arm:
    """Return the arm to compare with: the study's baseline, or the first arm of the same task and place.

    Measured and simulated arms are never compared.
    """
    base = study.arm(study.baseline)
    alike = [other for other in study.arms if (other.task, other.place) == (arm.task, arm.place)]
    return base if base in alike else alike[0]


def named(target: Target) -> str:
    """Return a target in words.

    >>> named(0.97), named("training-loss=0.05")
    ('97.00 %', 'training loss 0.05')
    """
    of, value = parse_target(target)
    return percent(value) if of == TARGETS[-1] else f"{of.replace('-', ' ')} {value:g}"


def percent(value: float) -> str:
    """Return an accuracy in percent."""
    return f"{100 * value:.2f} %" if math.isfinite(value) else "-"


def told_interval(interval: Interval) -> str:
    """Return a ratio with its interval as text.

    >>> told_interval(Interval(1.5, 2.0, 2.5)), told_interval(Interval(0.0, math.nan, math.inf))
    ('2 (1.5 to 2.5)', '-')
    """
    if not math.isfinite(interval.ratio):
        return "-"
    high = number(interval.high) if math.isfinite(interval.high) else "no bound"
    return f"{number(interval.ratio)} ({number(interval.low)} to {high})"
