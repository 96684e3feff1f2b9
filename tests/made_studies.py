"""Studies that were never run, for what reads their results: their figures are known beforehand."""

from __future__ import annotations

import math

from distbelief.lab.study.definition import Arm, Study
from distbelief.lab.study.figures import Report
from distbelief.lab.study.report import make_report
from distbelief.lab.study.trials import Point, Trial
from distbelief.record.summary import PARTS

TARGETS = (0.9, 0.95)


def made_trial(arm: str, seed: int, place: str, replicas: int, each: float, points: int) -> Trial:
    """A trial whose accuracy rises to 0.96, of steps that take `each` seconds."""
    made = [
        Point(each * 100 * at, at / 10, 6400 * at, 100 * at, 2.3 * math.exp(-at / 9), 0.96 - 0.9 * math.exp(-at / 6))
        for at in range(1, points + 1)
    ]
    last = made[-1]
    return Trial(
        arm=arm, seed=seed, command=f"distbelief train mnist downpour --seed {seed}", task="mnist", strategy="downpour",
        place=place, outcome="done", replicas=replicas, seconds=last.seconds, steps=last.steps, samples=last.samples,
        updates=last.steps,
        bytes=last.steps * 2_000_000, bytes_by_kind={"push": last.steps * 2_000_000},
        staleness={"0": 1, "2": 3}, busy=0.02, points=made,
        parts=dict.fromkeys(PARTS, each / 4),
    )  # fmt: skip


def made_report(arms: int = 6, seeds: int = 5, points: int = 30) -> Report:
    """A report of an arm with one replica on this machine, the baseline, and of simulated ones with more."""
    names = ["alone", *(f"many, replicas {2**at}" for at in range(arms - 1))]
    places = ["local", *["simulated"] * (arms - 1)]
    trials = [
        made_trial(name, seed, place, max(1, 2 ** (at - 1)), 0.001 * (1 + 0.01 * seed) * (at + 1), points)
        for at, (name, place) in enumerate(zip(names, places, strict=True))
        for seed in range(seeds)
    ]
    compared = tuple(Arm(name, "mnist", "downpour", place, ()) for name, place in zip(names, places, strict=True))
    study = Study(
        "A study <of> nothing", compared, tuple(range(seeds)), TARGETS, "alone", (), "Does & it show?",
    )  # fmt: skip
    return make_report(study, trials, {"cores": 2})
