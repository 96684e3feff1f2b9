"""What a study has found, in sentences: each made of its figures by a rule, none by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distbelief.study.figures import (
    BUSY,
    MADE,
    ArmFigures,
    Report,
    bare_name,
    held,
    number,
    percent,
    scaled,
    told_interval,
)

MOST = 10
WIDE = 1.5
"""A slowest seed that took so many times as long as the fastest is worth a word."""


def sentences(found: Report) -> list[str]:
    """At most ten, those of what was asked for first."""
    told = [text for rule in RULES if (text := rule(found))]
    return told[:MOST]


def _ran(found: Report) -> list[ArmFigures]:
    """Those of which something is known."""
    return [one for one in found.arms if one.trials > one.failed]


def _alike(found: Report) -> list[ArmFigures]:
    """Those of them that can be compared with the baseline."""
    return [one for one in _ran(found) if one.baseline == found.study.baseline]


def _target(found: Report) -> float | None:
    """The highest target that any arm reaches in the median, of those that can be compared."""
    return held(found.study.targets, _alike(found))


def _fastest(found: Report) -> str:
    if _target(found) is None:
        return f"No arm reaches {percent(found.study.targets[-1])} in the median." if found.study.targets else ""
    return _first(found, _alike(found))


def _fastest_elsewhere(found: Report) -> str:
    """Of arms that are compared with something else than the baseline: those of other tasks and places."""
    groups = [group for group in found.compared() if group[0].baseline != found.study.baseline and len(group) > 1]
    ran = [[one for one in group if one.trials > one.failed] for group in groups]
    return " ".join(_first(found, group) for group in ran if held(found.study.targets, group) is not None)


def _first(found: Report, arms: Sequence[ArmFigures]) -> str:
    """Which of some arms is first at the highest target that any of them reaches."""
    target = held(found.study.targets, arms)
    assert target is not None
    first = min(arms, key=lambda one: one.at(target).median)
    at = first.at(target)
    told = f"{first.name} is first at {percent(target)}, after {number(at.median)} s in the median of {at.of} seeds"
    if first.name == first.baseline:
        return f"{told}; nothing is faster than the baseline."
    if not math.isfinite(at.speed_up.ratio):
        return f"{told}; the baseline, {first.baseline}, does not get there in its budget."
    sure = "" if at.speed_up.low > 1 else ", so that these seeds cannot tell them apart"
    return f"{told}: {told_interval(at.speed_up)} times as fast as {first.baseline}{sure}."


def _why(found: Report) -> str:
    target = _target(found)
    if target is None:
        return ""
    first = min(_alike(found), key=lambda one: one.at(target).median)
    base = found.arm(found.study.baseline)
    one, other = first.at(target), base.at(target)
    if first is base or not math.isfinite(other.median):
        return ""
    steps, each = one.steps / other.steps, one.seconds_per_step / other.seconds_per_step
    return (
        f"{first.name} takes {number(each)} times the seconds of {base.name} for a step and {number(steps)} times its "
        f"steps to {percent(target)}: {number(each * steps)} times the time."
    )


def _missed(found: Report) -> str:
    target = _target(found)
    missed = [] if target is None else [one for one in _ran(found) if one.at(target).reached < one.at(target).of]
    told = ", ".join(f"{one.name} ({one.at(target).reached} of {one.at(target).of})" for one in missed if target)
    return f"These miss {percent(target)} with some seed or all: {told}." if told and target else ""


def _grid_ends(found: Report) -> str:
    """Where a better value may lie beyond what was looked through."""
    told = []
    for one in _ran(found):
        arm = found.study.arm(one.name)
        if one.value is not None and len(arm.grid) > 1 and one.value in (min(arm.grid), max(arm.grid)):
            end = "least" if one.value == min(arm.grid) else "largest"
            told.append(f"{one.name} ({arm.tuned.removeprefix('--')} {one.value:g}, the {end})")
    what = "The best value lies at an end of its grid, so that a better one may lie beyond"
    return f"{what}: {', '.join(told)}." if told else ""


def _fewest(found: Report) -> str:
    target = _target(found)
    alike = [one for one in _alike(found) if target is not None and math.isfinite(one.at(target).samples)]
    if target is None or len(alike) < 2:
        return ""
    least, most = (pick(alike, key=lambda one: one.at(target).samples) for pick in (min, max))
    return (
        f"{least.name} needs the fewest samples to {percent(target)}, {number(least.at(target).samples)}; {most.name} "
        f"the most that get there, {number(most.at(target).samples)}."
    )


def _throughput(found: Report) -> str:
    alike = _alike(found)
    if len(alike) < 2:
        return ""
    base = found.arm(found.study.baseline)
    first = max(alike, key=lambda one: one.samples_per_second)
    ratio = first.samples_per_second / base.samples_per_second if base in alike else math.nan
    told = f"{first.name} takes the most samples a second, {number(first.samples_per_second)}"
    return f"{told}." if first is base else f"{told}, {number(ratio)} times {base.name}'s."


def _accuracy(found: Report) -> str:
    alike = [one for one in _alike(found) if math.isfinite(one.accuracy)]
    if len(alike) < 2:
        return ""
    best, worst = max(alike, key=lambda one: one.accuracy), min(alike, key=lambda one: one.accuracy)
    return (
        f"At the end of the budget {best.name} is the most accurate, {percent(best.accuracy)}, and {worst.name} the "
        f"least, {percent(worst.accuracy)} (medians)."
    )


def _scaling(found: Report) -> str:
    """Of the arm that gains most by more replicas, measured and simulated: what they bring."""

    def gain(group: Sequence[ArmFigures]) -> float:
        return group[-1].samples_per_second / group[0].samples_per_second

    told = []
    for place, made in MADE.items():
        groups = [group for group in scaled(found) if group[0].place == place]
        if not groups:
            continue
        group = max(groups, key=gain)
        few, many = group[0].replicas, group[-1].replicas
        told.append(
            f"From {few} to {many} replicas {bare_name(group[0])} takes {number(gain(group))} times the samples a "
            f"second, {100 * gain(group) * few / many:.0f} % of what is ideal ({made}); no other gains more."
        )
    return " ".join(told)


def _staleness(found: Report) -> str:
    stale = max(_ran(found), key=lambda one: one.staleness, default=None)
    if stale is None or not stale.staleness > 0:
        return ""
    return f"Gradients of {stale.name} are the stalest: {number(stale.staleness)} updates old in the mean."


def _spread(found: Report) -> str:
    target = _target(found)
    wide: list[tuple[float, ArmFigures]] = []
    for one in _ran(found) if target is not None else ():
        times = [value for value in one.at(target).seconds if math.isfinite(value)] if target else []
        if len(times) > 1 and min(times) > 0:
            wide.append((max(times) / min(times), one))
    if not wide or target is None:
        return ""
    ratio, one = max(wide, key=lambda pair: pair[0])
    less = "" if ratio >= WIDE else "only "
    return (
        f"Seeds differ most in {one.name}: the slowest to {percent(target)} took {less}{number(ratio)} times as long."
    )


def _bytes(found: Report) -> str:
    most = max(_ran(found), key=lambda one: one.bytes_per_step, default=None)
    if most is None or not most.bytes_per_step > 0:
        return ""
    told = number(most.bytes_per_step / 1e6)
    return f"{most.name} moves the most between replicas and shards, {told} MB for each step."


def _failed(found: Report) -> str:
    failed = [one for one in found.arms if one.failed]
    told = "; ".join(f"{one.name} ({one.failed} of {one.trials}: {one.reason})" for one in failed)
    return f"Some trials could not be run to their end: {told}." if told else ""


def _machine(found: Report) -> str:
    local = [one for one in _ran(found) if one.place == "local"]
    if not local:
        return "All times are those of a simulated cluster." if found.arms else ""
    busy = max((one.busy for one in local if math.isfinite(one.busy)), default=0.0)
    cores = found.machine.get("cores")
    where = f"Times of real processes are of one machine with {cores} cores"
    if busy < BUSY:
        return f"{where}, which did nothing else."
    return f"{where}, of which something else took up to {100 * busy:.0f} %: they are no clean measurement."


RULES: Sequence[Callable[[Report], str]] = (
    _failed, _fastest, _fastest_elsewhere, _why, _missed, _grid_ends, _fewest, _throughput, _accuracy, _scaling,
    _machine, _staleness, _spread, _bytes,
)  # fmt: skip
