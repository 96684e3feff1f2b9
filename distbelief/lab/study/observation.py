"""A way to train beside others on the problems of a study: where it is sooner at a loss, and what decides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import correlation

import msgspec

from distbelief.lab.study.definition import Study
from distbelief.lab.study.figures import MEDIANS, ProblemFigures, without_replicas
from distbelief.lab.study.statistics import Interval, median, ratio_of_medians
from distbelief.lab.study.trials import Trial

SOONER, ALIKE, LATER = "sooner on", "not told apart on", "later on"
"""How the observed way stands to another, by the interval of the ratio of their times."""


def observe(study: Study, trials: Sequence[Trial]) -> list[ProblemFigures]:
    """Return how all ways stand on all problems, to the observed one; none, where the study has no problems."""
    figures, posed = [], [arm for arm in study.arms if arm.problem]
    for arm in posed:
        ones = sorted((one for one in trials if one.arm == arm.name), key=lambda one: one.seed)
        begun = [one for one in trials if one.task == arm.task and one.seed in study.seeds]
        words = dict(itertools.pairwise(arm.words))
        target = f"loss={arm.loss}"
        figures.append(
            ProblemFigures(
                problem=arm.problem,
                loss=arm.loss,
                way=without_replicas(arm.name).removeprefix(f"{arm.problem}: "),
                replicas=int(words.get("--replicas", max((one.replicas for one in ones), default=1))),
                value=ones[0].value if ones else None,
                seconds=[one.until(target) for one in ones],
                samples=median([one.until(target, "samples") for one in ones]),
                longer=Interval(1.0, 1.0, 1.0),
                staleness=median([MEDIANS["staleness"](one) or 0.0 for one in ones]),
                last=median([one.points[-1].loss for one in ones if one.points]),
                uneven=median([one.uneven for one in begun if one.uneven]),
            )
        )
    times = {(one.problem, one.replicas): one.seconds for one in figures if one.way == study.observed}
    for at, one in enumerate(figures):
        if one.way != study.observed:
            longer = ratio_of_medians(one.seconds, times.get((one.problem, one.replicas), []))
            figures[at] = msgspec.structs.replace(one, longer=longer)
    problems = [arm.problem for arm in posed]
    return sorted(figures, key=lambda one: (problems.index(one.problem), one.replicas))


def findings(study: Study, figures: Sequence[ProblemFigures]) -> list[str]:
    """Return where the observed way is sooner than others, by how much, and what that goes with: each by a rule."""
    texts = []
    for way, replicas in dict.fromkeys((one.way, one.replicas) for one in figures if one.way != study.observed):
        ones = [one for one in figures if (one.way, one.replicas) == (way, replicas)]
        where = [
            f"{verdict} {', '.join(f'{one.problem} ({one.gain})' for one in alike)}"
            for verdict in (SOONER, ALIKE, LATER)
            if (alike := [one for one in ones if _verdict(one) == verdict])
        ]
        count = f"{replicas} replicas" if replicas > 1 else "one replica"
        text = f"With {count} {study.observed} beside {way} is {'; '.join(where) or 'nowhere at the loss'}."
        known = [one for one in ones if _verdict(one) and math.isfinite(one.uneven)]
        uneven, gains = _ranks([one.uneven for one in known]), _ranks([one.longer.ratio for one in known])
        if len({*uneven}) > 2 and len({*gains}) > 1:
            how = f"{correlation(uneven, gains):.2f}"
            text += f" The gain goes with how uneven gradients are by a rank correlation of {how}."
        texts.append(text)
    return texts


def _verdict(one: ProblemFigures) -> str:
    """Return how the observed way stands to this one; "" where neither gets to the loss."""
    if math.isnan(one.longer.ratio):
        return ""
    return SOONER if one.longer.low > 1 else LATER if one.longer.high < 1 else ALIKE


def _ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, those that are equal in the middle of theirs.

    >>> _ranks([0.5, math.inf, 0.7, math.inf])
    [1, 6, 3, 6]
    """
    return [sum((other < value) + (other <= value) for other in values) for value in values]
