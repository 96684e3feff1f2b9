"""`bench large`: test accuracy of LeNet on MNIST in large minibatches, LARS beside SGD with momentum; both are tuned
alike, over several seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distbelief.bench.parts import workloads
from distbelief.bench.parts.timing import figure, finish, show
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.errors import TrainingError, UsageError
from distbelief.job import Job
from distbelief.record.machine import machine
from distbelief.strategies import Allreduce

RATES = {"lars": (5.0, 10.0, 20.0, 40.0), "momentum": (0.0125, 0.025, 0.05, 0.1)}
"""The learning rates that each is tried with, on the first seed; the best is taken on to the others."""
LEAST = 0.989
"""The figure to reach: mean accuracy of LARS."""


@dataclass(frozen=True)
class LargeOptions:
    """Options of `bench large`."""

    batch: int = 4096
    """Samples in an update; a multiple of --replicas times --batch-size."""
    batch_size: int = 512
    """Samples in a minibatch of one replica; it accumulates as many as a batch needs."""
    replicas: int = 2
    """Replicas, of allreduce."""
    epochs: int = 10
    """Epochs."""
    warmup_epochs: float = 2.0
    """Of these, warm-up, from a rate of 0; polynomial decay (power 2) follows."""
    weight_decay: float = 5e-4
    """Weight decay of both."""
    seeds: int = 3
    """Seeds: 0 and on."""
    json: str | None = None
    """File to write the result to."""
    quick: bool = False
    """One seed and one rate of digits: whether it runs, not how well."""
    quiet: bool = False
    """Print nothing."""
    QUICK: ClassVar[Mapping[str, object]] = {"seeds": 1, "epochs": 1, "warmup_epochs": 0.5}
    """Defaults with --quick."""


def run(options: LargeOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: no seed, or a batch that its minibatches do not fill.
    """
    each = options.replicas * options.batch_size
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: must be 1 or more")
    if options.batch < each or options.batch % each:
        raise UsageError(
            f"--batch {options.batch}: must be a multiple of --replicas times --batch-size, which is {each}"
        )
    facts, seeds = machine(), options.seeds
    tried: dict[str, dict[float, float]] = {}
    taken: dict[str, list[float]] = {}
    for name, rates in RATES.items():
        tried[name] = {rate: _accuracy(options, name, rate, 0) for rate in (rates[:1] if options.quick else rates)}
        best = max(tried[name], key=lambda rate: tried[name][rate])
        taken[name] = [tried[name][best], *(_accuracy(options, name, best, seed) for seed in range(1, seeds))]
    mean = {name: statistics.mean(accuracies) for name, accuracies in taken.items()}
    result = {"bench": "large", "machine": facts, "batch": options.batch, "epochs": options.epochs, "mean": mean,
        "seeds": taken,
              "rates": {name: {f"{rate:g}": accuracy for rate, accuracy in by.items()} for name, by in tried.items()},
              "figures": []}  # fmt: skip
    if not options.quick:
        ahead = 100 * (mean["lars"] - mean["momentum"])
        result["figures"] = [figure(f"mean accuracy of LARS, {seeds} seeds", mean["lars"], LEAST),
                             figure("points by which it is ahead of SGD", ahead, 0.0)]  # fmt: skip
    if not options.quiet:
        rows = [[name, *(f"{rate:g}: {100 * one:.2f} %" for rate, one in by.items()),
            *(f"{100 * one:.2f} %" for one in taken[name]),
                 f"{100 * mean[name]:.2f} %"] for name, by in tried.items()]  # fmt: skip
        columns = [
            *(f"rate {number + 1}" for number in range(len(rows[0]) - seeds - 2)),
            *(f"seed {seed}" for seed in range(seeds)),
            "mean",
        ]
        show(f"test accuracy in minibatches of {options.batch}, {options.epochs} epochs", ("optimizer", *columns), rows)
    return finish(result, options)


def _accuracy(options: LargeOptions, name: str, rate: float, seed: int) -> float:
    """Test accuracy at the end of a job; 0 of one whose loss is no number any more."""
    accumulate = options.batch // (options.replicas * options.batch_size)
    strategy = Allreduce(options.replicas, optim(name, rate, weight_decay=options.weight_decay), accumulate=accumulate)
    task = "digits" if options.quick else "mnist-lenet"
    job = Job(
        task, strategy, options.epochs, options.batch_size, "polynomial", seed=seed,
        warmup_epochs=options.warmup_epochs,
        evaluate_every=options.epochs, checkpoint_every=0, snapshot_every="0",
    )  # fmt: skip
    try:
        return float(workloads.run(job)["test_accuracy"])
    except TrainingError:
        return 0.0
