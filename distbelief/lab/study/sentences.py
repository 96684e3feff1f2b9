"""What a study has found, in sentences: each made of its figures by a rule, none by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distbelief.lab.study.figures import (
    BUSY,
    HOW,
    ArmFigures,
    Report,
    highest,
    kind,
    number,
    percent,
    scaled,
    told_interval,
    without_replicas,
)

MOST = 10
SHOWN = 5
"""So many arms are named in a list at most: the table has all."""
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
    """The highest target that any arm reaches in the median, of those that can be compared with the baseline."""
    return highest(found.study.targets, _alike(found))


def _several(told: Sequence[str], between: str = ", ") -> str:
    """What is said of some arms, in a list that can be read.

    >>> _several(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = len(told) - SHOWN
    return between.join(told[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _fastest(found: Report) -> str:
    return _first(found, _alike(found))


def _elsewhere(found: Report) -> str:
    """The fastest of each other group of arms, which is compared with the baseline of its own."""
    ran = _ran(found)
    groups = [[one for one in group if one in ran] for group in found.groups()]
    others = [group for group in groups if len(group) > 1 and group[0].baseline != found.study.baseline]
    return " ".join(f"Of {kind(group)}: {told}" for group in others if (told := _first(found, group)))


def _first(found: Report, alike: Sequence[ArmFigures]) -> str:
    """Who is the first at a target, of arms that are compared with each other."""
    target = highest(found.study.targets, alike)
    if target is None:
        return f"No arm reaches {percent(found.study.targets[0])} in the median." if found.study.targets else ""
    first = min(alike, key=lambda one: one.at(target).median)
    at = first.at(target)
    seeds = "with its one seed" if at.of == 1 else f"in the median of {at.of} seeds"
    told = f"{first.name} is first at {percent(target)}, after {number(at.median)} s {seeds}"
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
    if target is None:
        return ""
    missed = [at for at in ((one.name, one.at(target)) for one in _alike(found)) if at[1].reached < at[1].of]
    told = [f"{name} ({at.reached} of {at.of})" for name, at in missed]
    return f"These miss {percent(target)} with some seed or all: {_several(told)}." if told else ""


def _grid_ends(found: Report) -> str:
    """Where a better value may lie beyond what was looked through."""
    told = []
    for one in _ran(found):
        arm = found.study.arm(one.name)
        if one.value is not None and len(arm.grid) > 1 and one.value in (min(arm.grid), max(arm.grid)):
            end = "least" if one.value == min(arm.grid) else "largest"
            told.append(f"{one.name} ({arm.tuned.removeprefix('--')} {one.value:g}, the {end})")
    what = "The best value lies at an end of its grid, so that a better one may lie beyond"
    return f"{what}: {_several(told)}." if told else ""


def _fewest(found: Report) -> str:
    target = _target(found)
    alike = [one for one in _alike(found) if target is not None and math.isfinite(one.at(target).samples)]
    if target is None or len(alike) < 2:
        return ""
    least, most = (pick(alike, key=lambda one: one.at(target).samples) for pick in (min, max))
    if least is most:
        return ""
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
    ratio = first.samples_per_second / base.samples_per_second
    told = f"{first.name} takes the most samples a second, {number(first.samples_per_second)}"
    return f"{told}." if first is base or base not in alike else f"{told}, {number(ratio)} times {base.name}'s."


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
    """What replicas bring, where they bring most: of what was measured, and of what was simulated."""
    groups = list(scaled(found))
    told = []
    for place, how in HOW.items():
        group = max((one for one in groups if one[0].place == place), key=_growth, default=None)
        if group:
            few, many, ratio = group[0].replicas, group[-1].replicas, _growth(group)
            told.append(
                f"From {few} to {many} replicas {without_replicas(group[0].name)} takes {number(ratio)} times the "
                f"samples a second, {100 * ratio * few / many:.0f} % of what is ideal ({how})"
            )
    return f"{'. '.join(told)}; no arm grows by more." if told else ""


def _growth(group: Sequence[ArmFigures]) -> float:
    return group[-1].samples_per_second / group[0].samples_per_second


def _staleness(found: Report) -> str:
    stale = max(_alike(found), key=lambda one: one.staleness, default=None)
    if stale is None or not stale.staleness > 0:
        return ""
    return f"Gradients of {stale.name} are the stalest: {number(stale.staleness)} updates old in the mean."


def _spread(found: Report) -> str:
    target = _target(found)
    wide: list[tuple[float, ArmFigures]] = []
    for one in _alike(found) if target is not None else ():
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
    most = max(_alike(found), key=lambda one: one.bytes_per_step, default=None)
    if most is None or not most.bytes_per_step > 0:
        return ""
    told = number(most.bytes_per_step / 1e6)
    return f"{most.name} moves the most, {told} MB for each step."


def _failed(found: Report) -> str:
    failed = [one for one in found.arms if one.failed]
    told = [f"{one.name} ({one.failed} of {one.trials}: {one.reason})" for one in failed]
    return f"Some trials could not be run to their end: {_several(told, '; ')}." if told else ""


def _machine(found: Report) -> str:
    local = [one for one in _ran(found) if one.place == "local"]
    if not local:
        return "All times are those of a simulated cluster." if found.arms else ""
    if not found.machine:
        return "Times of real processes are as each run took them: on what machine, and what else it did, is not known."
    busy = max((one.busy for one in local if math.isfinite(one.busy)), default=0.0)
    where = f"Times of real processes are of one machine with {found.machine['cores']} cores"
    if busy < BUSY:
        return f"{where}, which did nothing else."
    return f"{where}, of which something else took up to {100 * busy:.0f} %: they are no clean measurement."


RULES: Sequence[Callable[[Report], str]] = (
    _failed, _fastest, _elsewhere, _why, _machine, _missed, _grid_ends, _scaling, _fewest, _throughput, _accuracy,
    _staleness, _spread, _bytes,
)  # fmt: skip
