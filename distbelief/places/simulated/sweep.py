"""Sweep: one simulated job under many seeds, the spread of its results, and the seeds that fail."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from distbelief.core.records import Outcome
from distbelief.errors import DataError, Interrupted, JobFailed, UsageError
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import task_of
from distbelief.record.live import SIMULATED
from distbelief.tasks import as_data

FIGURES = {
    "seconds": "{:,.3f}",
    "test_accuracy": "{:.2%}",
    "staleness": "{:.2f}",
    "samples_per_second": "{:,.0f}",
}
"""Figures that are compared, and their formats; `staleness` is the mean of a job."""
TIMED = ("seconds", "samples_per_second")
"""Figures on the simulated clock."""


class SeedResult(msgspec.Struct, frozen=True):
    """Result of the job under one seed."""

    seed: int
    outcome: Outcome
    reason: str
    seconds: float | None = None
    test_accuracy: float | None = None
    staleness: float | None = None
    samples_per_second: float | None = None

    @property
    def failed(self) -> bool:
        """Return whether the job failed."""
        return self.outcome == Outcome.FAILED


def sweep(place: Simulated, job: Job, count: int) -> Iterator[SeedResult]:
    """Run a job under so many seeds, from its own on, and yield each result; an interrupted one is the last.

    Raises:
        UsageError: the job cannot run under any seed, or is to leave a folder.
        DataError: its data are missing or damaged.

    >>> from distbelief.strategies import Downpour
    >>> swept = sweep(Simulated(phantom=True), Job("digits", Downpour(replicas=3), seed=7), 2)
    >>> [(one.seed, str(one.outcome), round(one.staleness, 1)) for one in swept]
    [(7, 'done', 1.8), (8, 'done', 1.9)]
    """
    if count < 1:
        raise UsageError(f"--sweep {count}: must be 1 or more seeds")
    for name, given in {"--keep": place.keep, "--out": job.out, "--resume": job.resume}.items():
        if given:
            raise UsageError(f"{name}: --sweep {count} leaves no run folder; leave {name} off, or run one seed with it")
    place.settings(job)
    task = task_of(job)
    train = as_data(task.train())
    job = dataclasses.replace(job, task=dataclasses.replace(task, train=lambda: train).named(task.reference))
    for seed in range(job.seed, job.seed + count):
        yield (ended := _one(place, dataclasses.replace(job, seed=seed)))
        if ended.outcome == Outcome.INTERRUPTED:
            return


def _one(place: Simulated, job: Job) -> SeedResult:
    try:
        result = place.run(job)
    except (UsageError, DataError, Interrupted):
        raise
    except JobFailed as error:
        return SeedResult(job.seed, Outcome.FAILED, str(error))
    except Exception as error:  # any error belongs to this seed: the other seeds still run
        return SeedResult(job.seed, Outcome.FAILED, f"{type(error).__name__}: {error}")
    figures = (result["seconds"], result["test_accuracy"], result["staleness"]["mean"], result["samples_per_second"])
    return SeedResult(job.seed, result["outcome"], result["reason"], *figures)


def spread(ended: Sequence[SeedResult]) -> dict[str, Any]:
    """Return the number of results with each outcome, and the least, the median and the largest of each figure.

    >>> spread([SeedResult(0, "done", "", 2.0), SeedResult(1, "done", "", 4.0), SeedResult(2, "failed", "")])["seconds"]
    {'min': 2.0, 'median': 3.0, 'max': 4.0}
    """
    found: dict[str, Any] = {"seeds": len(ended), "outcomes": dict(Counter(one.outcome for one in ended))}
    for name in FIGURES:
        values = [value for one in ended if (value := getattr(one, name)) is not None]
        found[name] = {"min": min(values), "median": statistics.median(values), "max": max(values)} if values else None
    return found


def lines(spread: dict[str, Any]) -> list[str]:
    r"""Return the lines of a small table that shows a spread.

    >>> print("\n".join(lines(spread([SeedResult(0, "done", "", 2.0, 0.5, 1.0, 1000.0), SeedResult(1, "failed", "")]))))
    2 seeds: 1 done, 1 failed
                                         min      median         max
    seconds simulated                  2.000       2.000       2.000
    test accuracy                     50.00%      50.00%      50.00%
    staleness                           1.00        1.00        1.00
    samples per second simulated       1,000       1,000       1,000
    """
    count = spread["seeds"]
    outcomes = ", ".join(f"{many} {outcome}" for outcome, many in spread["outcomes"].items())
    table = [f"{count} seed{'' if count == 1 else 's'}: {outcomes}"]
    table.append(" " * 28 + "".join(f"{name:>12}" for name in ("min", "median", "max")))
    for name, shown in FIGURES.items():
        if (row := spread[name]) is not None:
            told = name.replace("_", " ") + SIMULATED * (name in TIMED)
            table.append(f"{told:<28}" + "".join(f"{shown.format(row[one]):>12}" for one in ("min", "median", "max")))
    return table if len(table) > 2 else table[:1]
