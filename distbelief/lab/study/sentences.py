"""Findings of a study in sentences, each derived from its figures by a rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import correlation

import msgspec

from distbelief.lab import number
from distbelief.lab.study.definition import Study
from distbelief.lab.study.figures import (
    BUSY,
    HOW,
    MEDIANS,
    ArmFigures,
    ProblemFigures,
    Reached,
    Report,
    efficiency,
    highest,
    kind,
    named,
    percent,
    scaled,
    told_interval,
    without_replicas,
)
from distbelief.lab.study.trials import Interval, Trial, median, ratio_of_medians

MOST = 10
SHOWN = 5
WIDE = 1.5
"""Ratio of the slowest to the fastest seed below which a finding says "only"."""


def sentences(report: Report) -> list[str]:
    """Return at most ten sentences, the most important first."""
    ran = [arm for arm in report.arms if arm.trials > arm.failed]
    alike = [arm for arm in ran if arm.baseline == report.study.baseline]
    target = highest(report.study.targets, alike)
    # results at the highest target that any arm with the study's baseline reaches
    at = {} if target is None else {arm.name: arm.at(target) for arm in alike}
    main = [_failed(report), _first(report, alike), _elsewhere(report, ran), _why(report, at), _machine(report, ran)]
    more = [_missed(at), _grid_ends(report, ran), _scaling(report), _fewest(at), _throughput(report, alike)]
    rest = [_accuracy(alike), _staleness(alike), _spread(at), _bytes(alike)]
    return [text for text in (*main, *more, *rest) if text][:MOST]


def diagnoses(report: Report) -> list[str]:
    """Say of each arm what is probably wrong with its runs."""
    told: dict[str, list[str]] = {}
    for trial in report.trials:
        told.setdefault(trial.arm, []).extend(trial.diagnosis)
    return [f"{arm}: {_several([*dict.fromkeys(texts)], '; ')}." for arm, texts in told.items() if texts]


def _several(texts: Sequence[str], between: str = ", ") -> str:
    """Join texts to a list of readable length.

    >>> _several(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = len(texts) - SHOWN
    return between.join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _elsewhere(report: Report, ran: Sequence[ArmFigures]) -> str:
    groups = [[arm for arm in group if arm in ran] for group in report.groups()]
    others = [group for group in groups if len(group) > 1 and group[0].baseline != report.study.baseline]
    return " ".join(f"Of {kind(group)}: {text}" for group in others if (text := _first(report, group)))


def _first(report: Report, alike: Sequence[ArmFigures]) -> str:
    target = highest(report.study.targets, alike)
    if target is None:
        return f"{named(report.study.targets[0])} is reached by no arm in the median." if report.study.targets else ""
    first = min(alike, key=lambda arm: arm.at(target).median)
    at = first.at(target)
    seeds = "with its one seed" if at.of == 1 else f"in the median of {at.of} seeds"
    text = f"{first.name} reaches {named(target)} first, after {number(at.median)} s {seeds}"
    if first.name == first.baseline:
        return f"{text}; nothing is faster than the baseline."
    if not math.isfinite(at.speed_up.ratio):
        return f"{text}; the baseline, {first.baseline}, does not reach it in its budget."
    sure = "" if at.speed_up.low > 1 else ", a difference within the noise of these seeds"
    return f"{text}: {told_interval(at.speed_up)} times as fast as {first.baseline}{sure}."


def _why(report: Report, at: Mapping[str, Reached]) -> str:
    base = report.study.baseline
    first = min(at, key=lambda name: at[name].median, default=base)
    if first == base or base not in at or not math.isfinite(at[base].median):
        return ""
    steps = at[first].steps / at[base].steps
    each = at[first].seconds_per_step / at[base].seconds_per_step
    return (
        f"{first} takes {number(each)} times the seconds of {base} for a step and {number(steps)} times its steps to "
        f"{named(at[base].target)}: {number(each * steps)} times the time."
    )


def _missed(at: Mapping[str, Reached]) -> str:
    missed = [
        f"{name} ({reached.reached} of {reached.of})" for name, reached in at.items() if reached.reached < reached.of
    ]
    target = next((reached.target for reached in at.values()), "")
    return f"These miss {named(target)} with at least one seed: {_several(missed)}." if missed else ""


def _grid_ends(report: Report, ran: Sequence[ArmFigures]) -> str:
    """Name grids whose best value is an end, so that a better one may lie beyond."""
    ends = []
    for arm in ran:
        tuned, grid = report.study.arm(arm.name).tuned, report.study.arm(arm.name).grid
        if arm.value is not None and len(grid) > 1 and arm.value in (min(grid), max(grid)):
            end = "least" if arm.value == min(grid) else "largest"
            ends.append(f"{arm.name} ({tuned.removeprefix('--')} {arm.value:g}, the {end})")
    what = "The best value lies at an end of its grid, so that a better one may lie beyond"
    return f"{what}: {_several(ends)}." if ends else ""


def _fewest(at: Mapping[str, Reached]) -> str:
    samples = {name: reached.samples for name, reached in at.items() if math.isfinite(reached.samples)}
    if len({*samples.values()}) < 2:
        return ""
    least, most = (pick(samples, key=lambda name: samples[name]) for pick in (min, max))
    return (
        f"{least} needs the fewest samples to {named(at[least].target)}, {number(samples[least])}, and {most} the "
        f"most, {number(samples[most])}."
    )


def _throughput(report: Report, alike: Sequence[ArmFigures]) -> str:
    if len(alike) < 2:
        return ""
    base = report.arm(report.study.baseline)
    first = max(alike, key=lambda arm: arm.samples_per_second)
    ratio = first.samples_per_second / base.samples_per_second
    text = f"{first.name} takes the most samples a second, {number(first.samples_per_second)}"
    return f"{text}." if first is base or base not in alike else f"{text}, {number(ratio)} times {base.name}'s."


def _accuracy(alike: Sequence[ArmFigures]) -> str:
    known = [arm for arm in alike if math.isfinite(arm.accuracy)]
    if len(known) < 2:
        return ""
    best, worst = (pick(known, key=lambda arm: arm.accuracy) for pick in (max, min))
    return (
        f"At the end of the budget {best.name} is the most accurate, {percent(best.accuracy)}, and {worst.name} the "
        f"least, {percent(worst.accuracy)} (medians)."
    )


def _scaling(report: Report) -> str:
    groups, texts = list(scaled(report.arms)), []
    for place, how in HOW.items():
        group = max((group for group in groups if group[0].place == place), key=_growth, default=None)
        if group:
            few, many = group[0], group[-1]
            ideal = efficiency(many.samples_per_second, many.replicas, few.samples_per_second / few.replicas)
            texts.append(
                f"From {few.replicas} to {many.replicas} replicas {without_replicas(few.name)} takes "
                f"{number(_growth(group))} times the samples a second, {100 * ideal:.0f} % of the ideal ({how})"
            )
    return f"{'. '.join(texts)}; no other arm gains more." if texts else ""


def _growth(group: Sequence[ArmFigures]) -> float:
    return group[-1].samples_per_second / group[0].samples_per_second


def _staleness(alike: Sequence[ArmFigures]) -> str:
    stale = max((arm for arm in alike if arm.staleness > 0), key=lambda arm: arm.staleness, default=None)
    if stale is None:
        return ""
    return f"Gradients of {stale.name} are the stalest: {number(stale.staleness)} updates old on average."


def _spread(at: Mapping[str, Reached]) -> str:
    wide = {}
    for name, reached in at.items():
        times = [value for value in reached.seconds if math.isfinite(value)]
        if len(times) > 1 and min(times) > 0:
            wide[name] = max(times) / min(times)
    if not wide:
        return ""
    name = max(wide, key=lambda name: wide[name])
    less = "" if wide[name] >= WIDE else "only "
    return (
        f"Seeds differ most in {name}: the slowest to {named(at[name].target)} took {less}{number(wide[name])} times "
        "as long."
    )


def _bytes(alike: Sequence[ArmFigures]) -> str:
    most = max((arm for arm in alike if arm.bytes_per_step > 0), key=lambda arm: arm.bytes_per_step, default=None)
    return f"{most.name} moves the most, {number(most.bytes_per_step / 1e6)} MB for each step." if most else ""


def _failed(report: Report) -> str:
    failed = [f"{arm.name} ({arm.failed} of {arm.trials}: {arm.reason})" for arm in report.arms if arm.failed]
    return f"Some trials failed: {_several(failed, '; ')}." if failed else ""


def _machine(report: Report, ran: Sequence[ArmFigures]) -> str:
    local = [arm for arm in ran if arm.place == "local"]
    if not local:
        return "All times are those of a simulated cluster." if ran else ""
    if not report.machine:
        return "Times of real processes come from the runs: their machine and its other load are unknown."
    busy = max((arm.busy for arm in local if math.isfinite(arm.busy)), default=0.0)
    where = f"Times of real processes are of one machine with {report.machine['cores']} cores"
    if busy < BUSY:
        return f"{where}, which did nothing else."
    return f"{where}, and other work took up to {100 * busy:.0f} % of it: the measurement is not clean."


SOONER, ALIKE, LATER = "sooner on", "not distinguishable on", "later on"
"""Relations of the observed way to another, by the interval of the ratio of their times."""


def observe(study: Study, trials: Sequence[Trial]) -> list[ProblemFigures]:
    """Return the figures of all ways on all problems, relative to the observed way."""
    figures, posed = [], [arm for arm in study.arms if arm.problem]
    for arm in posed:
        counted = sorted((trial for trial in trials if trial.arm == arm.name), key=lambda trial: trial.seed)
        begun = [trial for trial in trials if trial.task == arm.task and trial.seed in study.seeds]
        words = dict(itertools.pairwise(arm.words))
        target = f"loss={arm.loss}"
        figures.append(
            ProblemFigures(
                problem=arm.problem,
                loss=arm.loss,
                way=without_replicas(arm.name).removeprefix(f"{arm.problem}: "),
                replicas=int(words.get("--replicas", max((trial.replicas for trial in counted), default=1))),
                value=counted[0].value if counted else None,
                seconds=[trial.until(target) for trial in counted],
                samples=median([trial.until(target, "samples") for trial in counted]),
                longer=Interval(1.0, 1.0, 1.0),
                staleness=median([MEDIANS["staleness"](trial) or 0.0 for trial in counted]),
                last=median([trial.points[-1].loss for trial in counted if trial.points]),
                uneven=median([trial.uneven for trial in begun if trial.uneven]),
            )
        )
    times = {(way.problem, way.replicas): way.seconds for way in figures if way.way == study.observed}
    for at, way in enumerate(figures):
        if way.way != study.observed:
            longer = ratio_of_medians(way.seconds, times.get((way.problem, way.replicas), []))
            figures[at] = msgspec.structs.replace(way, longer=longer)
    problems = [arm.problem for arm in posed]
    return sorted(figures, key=lambda way: (problems.index(way.problem), way.replicas))


def findings(study: Study, figures: Sequence[ProblemFigures]) -> list[str]:
    """Say where the observed way is faster than others, by how much, and what the gain correlates with."""
    texts = []
    for way, replicas in dict.fromkeys(
        (figure.way, figure.replicas) for figure in figures if figure.way != study.observed
    ):
        ones = [figure for figure in figures if (figure.way, figure.replicas) == (way, replicas)]
        where = [
            f"{verdict} {', '.join(f'{figure.problem} ({figure.gain})' for figure in alike)}"
            for verdict in (SOONER, ALIKE, LATER)
            if (alike := [figure for figure in ones if _verdict(figure) == verdict])
        ]
        count = f"{replicas} replicas" if replicas > 1 else "one replica"
        text = f"With {count} {study.observed} compared with {way} is {'; '.join(where) or 'nowhere at the loss'}."
        known = [figure for figure in ones if _verdict(figure) and math.isfinite(figure.uneven)]
        uneven, gains = _ranks([figure.uneven for figure in known]), _ranks([figure.longer.ratio for figure in known])
        if len({*uneven}) > 2 and len({*gains}) > 1:
            how = f"{correlation(uneven, gains):.2f}"
            text += f" Gain and unevenness of gradients have a rank correlation of {how}."
        texts.append(text)
    return texts


def _verdict(figure: ProblemFigures) -> str:
    """Return the observed way's relation to this one; "" if neither reaches the loss."""
    if math.isnan(figure.longer.ratio):
        return ""
    return SOONER if figure.longer.low > 1 else LATER if figure.longer.high < 1 else ALIKE


def _ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value; equal ones share their middle rank.

    >>> _ranks([0.5, math.inf, 0.7, math.inf])
    [1, 6, 3, 6]
    """
    return [sum((other < value) + (other <= value) for other in values) for value in values]
