"""`bench accuracy`: test accuracy of MNIST trained by Downpour beside `single`'s, over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distbelief.bench.parts import workloads
from distbelief.bench.parts.timing import figure, finish, show
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.record.machine import machine
from distbelief.strategies import Downpour, Single, Strategy

EARLY, LATE = 5, 10
"""Epochs after which it is looked at."""
LEAST, POINTS = 0.975, 0.3
"""The figures to reach: accuracy of every seed after `EARLY` epochs, and percentage points between the means after
`LATE`.
"""


@dataclass(frozen=True)
class AccuracyOptions:
    """Options of `bench accuracy`."""

    task: str = "mnist"
    """What is trained."""
    replicas: int = 2
    """Replicas of Downpour."""
    shards: int = 2
    """Its shards."""
    prefetch: int = 0
    """Its prefetch."""
    optimizer: str = "adagrad"
    """What both step with."""
    lr: float = 0.02
    """Learning rate of both."""
    seeds: int = 5
    """Seeds: 0 and on."""
    json: str | None = None
    """File to write the result to."""
    quick: bool = False
    """One seed of digits: whether it runs, not how well."""
    quiet: bool = False
    """Print nothing."""
    QUICK: ClassVar[Mapping[str, object]] = {"task": "digits", "seeds": 1}
    """Defaults with --quick."""


def run(options: AccuracyOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: no seed.
    """
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: must be 1 or more")
    facts, optimizer = machine(), optim(options.optimizer, options.lr)
    task, seeds = options.task, options.seeds
    single, downpour = [], []
    for seed in range(seeds):
        single.append(_accuracies(task, Single(optimizer=optimizer), seed))
        downpour.append(_accuracies(task, _downpour(options, optimizer), seed))
    mean = {name: {str(epoch): statistics.mean(one[epoch] for one in runs) for epoch in (EARLY, LATE)} for name, runs in
            (("single", single), ("downpour", downpour))}  # fmt: skip
    result = {"bench": "accuracy", "machine": facts, "task": task, "replicas": options.replicas,
        "shards": options.shards,
              "prefetch": options.prefetch, "optimizer": options.optimizer, "lr": options.lr, "mean": mean,
              "seeds": [{"seed": seed, "single": _named(one), "downpour": _named(other)}
                        for seed, (one, other) in enumerate(zip(single, downpour, strict=True))],
                        "figures": []}  # fmt: skip
    if task == "mnist":
        apart = 100 * (mean["single"][str(LATE)] - mean["downpour"][str(LATE)])
        result["figures"] = [
            figure(f"least accuracy of {seeds} seeds after {EARLY} epochs", min(one[EARLY] for one in downpour), LEAST),
            figure(f"points by which the mean after {LATE} epochs is under single's", apart, POINTS, lower=True),
        ]
    if not options.quiet:
        rows = [[str(seed), *(f"{100 * one[epoch]:.2f} %" for epoch in (EARLY, LATE) for one in both)]
                for seed, both in enumerate(zip(single, downpour, strict=True))]  # fmt: skip
        rows.append(
            [
                "mean",
                *(
                    f"{100 * mean[name][str(epoch)]:.2f} %"
                    for epoch in (EARLY, LATE)
                    for name in ("single", "downpour")
                ),
            ]
        )
        columns = [f"{name}, {epoch} epochs" for epoch in (EARLY, LATE) for name in ("single", "downpour")]
        show(f"test accuracy on {task}: {options.optimizer}, lr {options.lr:g}", ("seed", *columns), rows)
    return finish(result, options)


def _downpour(options: AccuracyOptions, optimizer: Optimizer) -> Downpour:
    return Downpour(replicas=options.replicas, shards=options.shards, prefetch=options.prefetch, optimizer=optimizer)


def _named(accuracies: dict[int, float]) -> dict[str, float]:
    return {str(epoch): accuracy for epoch, accuracy in accuracies.items()}


def _accuracies(task: str, strategy: Strategy, seed: int) -> dict[int, float]:
    """Test accuracy after `EARLY` and `LATE` epochs: a job of each length, since a running job is measured a little
    after its epoch.
    """
    accuracies = {}
    for epochs in (EARLY, LATE):
        job = Job(task=task, strategy=strategy, epochs=epochs, seed=seed, evaluate_every=epochs, checkpoint_every=0)
        accuracies[epochs] = float(workloads.run(job)["test_accuracy"])
    return accuracies
