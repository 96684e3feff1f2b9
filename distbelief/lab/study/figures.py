"""What the trials of each arm add up to: its figures, and a table of them."""

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
from distbelief.lab.study.claims import Judged, momentum
from distbelief.lab.study.definition import TARGETS, Arm, Study, Target, parse_target
from distbelief.lab.study.trials import SHRUNK, Interval, Trial, median, ratio_of_medians
from distbelief.record.summary import PARTS, moved

BUSY = 0.1
"""The part of a machine that others take, from which it is said to have been busy."""
WIDTH = 100
"""Letters of a line of a table, at most: longer names are broken."""
HOW = {"local": "measured", "simulated": "simulated"}
"""How figures of a place are known."""


class Reached(msgspec.Struct, frozen=True):
    """How an arm stands to one target."""

    target: Target
    reached: int
    of: int
    seconds: list[float]
    """Of each trial, in the order of its seeds; a miss is infinite, null in JSON."""
    median: float
    speed_up: Interval
    """Against the baseline, of the same task and place."""
    seconds_per_step: float
    """Hardware efficiency, of the median trial."""
    steps: float
    """Statistical efficiency: median, a miss infinite."""
    samples: float
    epochs: float
    """Median, a miss infinite."""
    fewer_epochs: Interval
    """Epochs of the baseline over these."""


class ProblemFigures(msgspec.Struct, frozen=True):
    """Figures of an arm on its problem, beside those of the observed way with as many replicas."""

    problem: str
    loss: float
    way: str
    replicas: int
    value: float | None
    """Best value of the tuned option."""
    seconds: list[float]
    """To the loss, of each trial, in the order of its seeds; a miss is infinite."""
    samples: float
    """Median, a miss infinite."""
    longer: Interval
    """Its time over that of the observed way."""
    staleness: float
    """Mean."""
    last: float
    """Test loss at the end, median."""
    uneven: float
    """Median `trials.unevenness` of the problem, over its seeds."""

    @property
    def gain(self) -> str:
        """Times as long as the observed way takes."""
        return "never" if self.longer.ratio == math.inf else told_interval(self.longer)

    def row(self) -> list[str]:
        """Its cells in a table below `PROBLEM_HEAD`."""
        best = "-" if self.value is None else f"{self.value:g}"
        reached = f"{sum(map(math.isfinite, self.seconds))} of {len(self.seconds)}"
        figures = map(number, (self.staleness, self.last, self.samples, median(self.seconds)))
        return [self.way, str(self.replicas), best, *figures, reached, self.gain]


PROBLEM_HEAD = ["way", "replicas", "best", "staleness", "last loss", "samples", "seconds", "reached", "times as long"]


class Medians(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the trials of an arm that did not fail; `MEDIANS` says of what."""

    accuracy: float
    """At the end."""
    seconds: float
    samples_per_second: float
    seconds_per_step: float
    seconds_per_update: float
    bytes_per_step: float
    bytes_by_kind: dict[str, float]
    """Bytes of a step."""
    staleness: float
    """Mean."""
    most_staleness: float
    momentum: float
    """As which staleness acts."""
    cosine: float
    """Of a minibatch's gradient and the whole one, where the study measures it."""


MEDIANS: Mapping[str, Callable[[Trial], float | None]] = {
    "accuracy": lambda one: one.accuracy,
    "seconds": lambda one: one.seconds,
    "samples_per_second": lambda one: _per(one.samples, one.seconds),
    "seconds_per_step": lambda one: _per(one.seconds, one.steps),
    "seconds_per_update": lambda one: _per(one.seconds, one.updates),
    "bytes_per_step": lambda one: _per(one.bytes, one.steps),
    "staleness": lambda one: _mean(one.staleness),
    "most_staleness": lambda one: max(map(int, one.staleness), default=0),
    "momentum": lambda one: momentum(one.staleness),
    "cosine": lambda one: one.cosine,
}
"""Figure of a trial, None where it is not known, by the name of its median."""


class ArmFigures(Medians, frozen=True, kw_only=True):
    """Figures of an arm, of all its trials."""

    name: str
    task: str
    strategy: str
    place: str
    baseline: str
    command: str
    value: float | None
    """Best value of the tuned option."""
    replicas: int
    trials: int
    failed: int
    reason: str
    """Why trials failed; "" where none did."""
    parts: dict[str, float]
    """Seconds of a step; empty where they are not known."""
    busy: float
    """The part of the machine that others took, at most."""
    targets: list[Reached]

    @property
    def accuracy_with_failed(self) -> float:
        """At the end, where a trial that failed counts as knowing nothing."""
        return 0.0 if self.failed > self.trials - self.failed else self.accuracy

    def at(self, target: Target) -> Reached:
        """How it stands to a target."""
        return next(one for one in self.targets if one.target == target)


class ShrunkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an arm that compresses what another has trained, over its seeds."""

    name: str
    of: str
    trials: int
    reason: str
    """Why some failed; "" where none did."""
    means: dict[str, float]
    """By `SHRUNK`."""
    spreads: dict[str, float]
    """Standard deviations; 0 of one seed."""

    def row(self) -> list[str]:
        """Its cells in a table below `SHRUNK_HEAD`."""
        if not self.means:
            return [self.name, str(self.trials), self.reason, "", "", ""]
        errors = [
            f"{self.means[name]:.2f} ± {self.spreads[name]:.2f}" if name in self.means else "-"
            for name in ("dense_error", "test_error")
        ]
        return [self.name, str(self.trials), *errors, f"{self.means['bytes']:,.0f}", f"{self.means['ratio']:.1f}"]


SHRUNK_HEAD = ["compressed", "trials", "dense error %", "error %", "bytes", "times fewer"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    study: Study
    machine: Json
    left: int
    """Trials that are still to be run."""
    arms: list[ArmFigures]
    trials: list[Trial]
    """Those that count, without those that chose values."""
    shrunk: list[ShrunkFigures] = []
    """Of the arms that compress what others have trained."""
    problems: list[ProblemFigures] = []
    """Figures of the arms that are on problems."""
    sentences: list[str] = []
    claims: list[Judged] = []
    """What was expected, and what was found."""
    cost: str = ""
    """What the study took, in a sentence."""

    def arm(self, name: str) -> ArmFigures:
        """The figures of an arm."""
        return next(one for one in self.arms if one.name == name)

    def groups(self) -> list[list[ArmFigures]]:
        """Arms that are compared with each other: of one baseline; those of the study's own are the first."""
        found: dict[str, list[ArmFigures]] = {self.study.baseline: []}
        for one in self.arms:
            found.setdefault(one.baseline, []).append(one)
        return [group for group in found.values() if group]

    def problem_tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield a heading and a table of each problem."""
        for problem in dict.fromkeys(one.problem for one in self.problems):
            alike = [one for one in self.problems if one.problem == problem]
            heading = f"{problem}: to a loss of {alike[0].loss:g}; unevenness of gradients {number(alike[0].uneven)}"
            yield heading, [PROBLEM_HEAD, *(one.row() for one in alike)]

    def lines(self) -> list[str]:
        """A table of each problem, or group of arms, one of those that compress others, and the sentences."""
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
            lines += [*_aligned([SHRUNK_HEAD, *(one.row() for one in self.shrunk)]), ""]
        lines += self.sentences
        if self.claims:
            lines += ["", *(one.line() for one in self.claims)]
        lines += [self.cost] if self.cost else []
        return lines + ([f"{self.left} trials are still to be run"] if self.left else [])


def table(group: Sequence[ArmFigures], targets: Sequence[Target]) -> list[list[str]]:
    """A head, and a row for each of some arms that are compared: how they train, and when they hold each target."""
    names = [f" {named(one)}" for one in targets] if targets[1:] else [""] * len(targets)
    heads = [f"{head}{name}" for name in names for head in ("seconds", "reached", "speed-up")]
    shares = efficiencies(group)
    rows = [["arm", "trials", "accuracy", "samples/s", *["efficiency"] * bool(shares), *heads]]
    for one in group:
        failed = "failed" if one.failed and one.failed == one.trials else ""
        row = [one.name, str(one.trials), failed or percent(one.accuracy), number(one.samples_per_second)]
        row += [f"{100 * shares[one.name]:.0f} %" if one.name in shares else "-"] * bool(shares)
        for at in map(one.at, targets):
            row += [number(at.median), f"{at.reached} of {at.of}", told_interval(at.speed_up)]
        rows.append(row)
    return rows


def tables(group: Sequence[ArmFigures], targets: Sequence[Target]) -> list[list[list[str]]]:
    """List the tables of some arms that are compared; that of epochs and bytes where there is anything in it."""
    more = epochs_table(group, targets)
    return [table(group, targets), *[more] * (len(more[0]) > 1)]


def epochs_table(group: Sequence[ArmFigures], targets: Sequence[Target]) -> list[list[str]]:
    """A head, and a row for each of some arms: the epochs till they hold each target, and what a step moves."""
    names = [f" {named(one)}" for one in targets] if targets[1:] else [""] * len(targets)
    kinds = [kind for kind in moved({}) if any(one.bytes_by_kind[kind] > 0 for one in group)]
    heads = [f"{head}{name}" for name in names for head in ("epochs", "speed-up in epochs")]
    rows = [["arm", *heads, *(f"{kind.replace('_', '-')} B/step" for kind in kinds)]]
    for one in group:
        standing = [(number(at.epochs), told_interval(at.fewer_epochs)) for at in map(one.at, targets)]
        sizes = [number(one.bytes_by_kind[kind]) for kind in kinds]
        rows.append([one.name, *(cell for cells in standing for cell in cells), *sizes])
    return rows


def figures(study: Study, trials: Sequence[Trial], arm: Arm) -> ArmFigures:
    """Sum up the trials of an arm."""
    base = baseline_of(study, arm)
    every, theirs = (
        sorted((one for one in trials if one.arm == name), key=lambda one: one.seed) for name in (arm.name, base.name)
    )
    own, failed = ([one for one in every if one.failed == broken] for broken in (False, True))
    known = {name: [value for one in own if (value := of(one)) is not None] for name, of in MEDIANS.items()}
    return ArmFigures(
        name=arm.name,
        task=arm.task,
        strategy=arm.strategy,
        place=arm.place,
        baseline=base.name,
        command=every[0].command if every else "",
        value=every[0].value if every else None,
        replicas=own[0].replicas if own else 0,
        trials=len(every),
        failed=len(failed),
        reason=failed[0].reason if failed else "",
        bytes_by_kind={
            kind: median([one.bytes_by_kind.get(kind, 0) / max(1, one.steps) for one in own]) for kind in moved({})
        },
        parts={name: median([one.parts[name] for one in own]) for name in PARTS} if own and own[0].parts else {},
        busy=max((one.busy for one in own if one.busy is not None), default=math.nan),
        targets=[_reached(target, every, theirs) for target in study.targets],
        **{name: median(values) for name, values in known.items()},
    )


def shrunk_figures(trials: Sequence[Trial], arm: Arm) -> ShrunkFigures:
    """Sum up the trials of an arm that compresses what another has trained."""
    own = [one for one in trials if one.arm == arm.name]
    found = {name: values for name in SHRUNK if (values := [one.shrunk[name] for one in own if name in one.shrunk])}
    reason = next((one.reason for one in own if one.failed), "")
    means = {name: fmean(values) for name, values in found.items()}
    spreads = {name: stdev(values) if len(values) > 1 else 0.0 for name, values in found.items()}
    return ShrunkFigures(name=arm.name, of=arm.compresses, trials=len(own), reason=reason, means=means, spreads=spreads)


def kind(group: Sequence[ArmFigures]) -> str:
    """What arms that are compared have in common."""
    return f"{group[0].task}, {HOW[group[0].place]}"


def highest(targets: Sequence[Target], arms: Sequence[ArmFigures]) -> Target | None:
    """The last target that any of some arms reaches in the median; None where none reaches one."""
    return next((one for one in reversed(targets) if any(math.isfinite(arm.at(one).median) for arm in arms)), None)


def without_replicas(name: str) -> str:
    """The name of an arm without the number of its replicas.

    >>> without_replicas("downpour, replicas 4, lr 0.1"), without_replicas("serial")
    ('downpour, lr 0.1', 'serial')
    """
    return re.sub(r", replicas \d+(?=,|$)", "", name)


def scaled(arms: Sequence[ArmFigures]) -> Iterator[list[ArmFigures]]:
    """Arms of which something is known and that differ in the number of replicas only, the fewest first."""
    alike: dict[tuple[str, str, str], list[ArmFigures]] = {}
    for one in arms:
        if math.isfinite(one.samples_per_second) and without_replicas(one.name) != one.name:
            alike.setdefault((without_replicas(one.name), one.task, one.place), []).append(one)
    yield from (sorted(several, key=lambda one: one.replicas) for several in alike.values() if len(several) > 1)


def efficiencies(arms: Sequence[ArmFigures]) -> dict[str, float]:
    """Samples a second of N replicas, over N times those of one; by the names of arms that are there with one too."""
    with_one = [several for several in scaled(arms) if several[0].replicas == 1 and several[0].samples_per_second]
    rates = {one.name: (one, several[0].samples_per_second) for several in with_one for one in several}
    return {name: one.samples_per_second / (one.replicas * rate) for name, (one, rate) in rates.items()}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells as lines, the first column to the left; a long name there goes on below."""
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


def _reached(target: Target, own: Sequence[Trial], theirs: Sequence[Trial]) -> Reached:
    """How an arm stands to a target, beside the trials of its baseline; a trial that failed is a miss."""

    def less(what: str) -> Interval:
        amounts, base = ([one.until(target, what) for one in trials] for trials in (own, theirs))
        # of the same trials it is one, and not what two draws of them have by chance
        same = own == theirs and math.isfinite(median(amounts))
        return Interval(1.0, 1.0, 1.0) if same else ratio_of_medians(base, amounts)

    points, seconds = [one.held(target) for one in own], [one.until(target) for one in own]
    a_step = median([point.seconds / point.steps for point in points if point and point.steps])
    steps, samples, epochs = (
        median([one.until(target, name) for one in own]) for name in ("steps", "samples", "epochs")
    )
    reached = sum(map(math.isfinite, seconds))
    return Reached(
        target, reached, len(seconds), seconds, median(seconds), less("seconds"), a_step, steps, samples, epochs,
        less("epochs"),
    )  # fmt: skip


def baseline_of(study: Study, arm: Arm) -> Arm:
    """What an arm is compared with: the study's baseline, or the first arm of its task and place, where that is of
    another: what was measured and what was simulated are never compared.
    """
    base = study.arm(study.baseline)
    alike = [one for one in study.arms if (one.task, one.place) == (arm.task, arm.place)]
    return base if base in alike else alike[0]


def number(value: float) -> str:
    """A number with three digits that count; what was missed as a dash.

    >>> number(0.01234), number(1234.5), number(math.inf)
    ('0.0123', '1,234', '-')
    """
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def named(target: Target) -> str:
    """A target in words.

    >>> named(0.97), named("training-loss=0.05")
    ('97.00 %', 'training loss 0.05')
    """
    of, value = parse_target(target)
    return percent(value) if of == TARGETS[-1] else f"{of.replace('-', ' ')} {value:g}"


def percent(value: float) -> str:
    """An accuracy.

    >>> percent(0.97531)
    '97.53 %'
    """
    return f"{100 * value:.2f} %" if math.isfinite(value) else "-"


def told_interval(found: Interval) -> str:
    """A ratio with its interval.

    >>> told_interval(Interval(1.5, 2.0, 2.5)), told_interval(Interval(0.0, math.nan, math.inf))
    ('2 (1.5 to 2.5)', '-')
    """
    if not math.isfinite(found.ratio):
        return "-"
    high = number(found.high) if math.isfinite(found.high) else "no bound"
    return f"{number(found.ratio)} ({number(found.low)} to {high})"
