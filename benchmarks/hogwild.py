"""Replicas on one mapping beside a plain Hogwild loop, and what locks cost where gradients are sparse
and where they are dense.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from benchmarks.parts import loops, workloads
from benchmarks.parts.timing import BenchOptions, figure, finish, interleave, rates, ratio
from distbelief.cli.tables import number, show
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.record.machine import machine
from distbelief.strategies import Hogwild, Locking
from distbelief.strategies.shared_memory.options import Mapped
from distbelief.tasks import as_data, resolve

RATE = 0.01
"""Learning rate on the MLP: plain SGD, slow enough that nobody diverges on a crowded machine."""
WAYS: dict[str, Callable[..., Mapped]] = {
    "none": Hogwild,
    "shard": lambda **options: Locking(locks="shard", **options),
    "global": lambda **options: Locking(locks="global", **options),
}
SVMS = ("sparse-svm", "dense-svm")
OURS, PLAIN, GLOBAL = (
    "hogwild, 2 replicas",
    "plain loop, 2 processes",
    "locking --locks global, 2 replicas",
)


@dataclass(frozen=True)
class HogwildOptions(BenchOptions):
    """Options of the benchmark hogwild."""

    repeats: int = 7
    """Rounds in which all contenders take their turns."""
    epochs: int = 8
    """Passes over MNIST in one turn of the MLP: a job's first step and its last report count too, and are to weigh
    little.
    """
    batch_size: int = 64
    """Samples in a minibatch of the MLP."""
    svm_batch_size: int = 8
    """Samples in a minibatch of the support vector machines; the paper's is 1, whose steps are mostly Python here."""
    QUICK: ClassVar[Mapping[str, object]] = {"repeats": 1, "epochs": 1, "svm_batch_size": 512}
    """Defaults with --quick."""


def run(options: HogwildOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: a number of repeats that cannot be.
        DataError: there is no MNIST.
    """
    facts = machine()
    mlp, svm = _mlp(options), _svm(options)
    result = {"bench": "hogwild", "machine": facts, "repeats": options.repeats, "mlp": mlp, "svm": svm,
              "figures": [figure(f"mlp: {OURS}, of {PLAIN}", mlp["of_ours"][PLAIN], 1.0),
                          figure(f"mlp: {OURS}, of {GLOBAL}", mlp["of_ours"][GLOBAL], 1.0)]}  # fmt: skip
    if not options.quiet:
        rows = [
            [name, number(rate), f"{mlp['spread'][name]:.0%}", number(mlp["of_ours"][name])]
            for name, rate in mlp["samples_per_second"].items()
        ]
        show(f"mlp: {mlp['samples']:,} samples a turn", ("", "samples/s", "+-", "hogwild is, times this"), rows)
        lines = [[f"{task}, locks {way}", *map(number, one)] for task, ways in svm.items() for way, one in ways.items()]
        show(
            f"support vector machines, minibatches of {options.svm_batch_size}",
            ("", "1 replica, samples/s", "2 replicas", "speed-up"),
            lines,
        )
    return finish(result, options)


def _mlp(options: HogwildOptions) -> Json:
    task = "benchmarks.parts.workloads:mlp_quick" if options.quick else "mnist"
    samples = len(as_data(resolve(task).train())) * options.epochs
    workload = loops.Workload(task, max(1, samples // options.batch_size // 2), options.batch_size, RATE)
    taken = interleave(
        {
            OURS: partial(
                _job, task, Hogwild(replicas=2, optimizer=Optimizer("sgd", RATE)), options.epochs, options.batch_size
            ),
            PLAIN: partial(loops.beside, workload, "hogwild"),
            GLOBAL: partial(
                _job,
                task,
                Locking(replicas=2, locks="global", optimizer=Optimizer("sgd", RATE)),
                options.epochs,
                options.batch_size,
            ),
        },
        options.repeats,
    )
    return {
        "samples": samples,
        **rates(taken),
        "of_ours": {name: ratio(taken[OURS], values) for name, values in taken.items()},
    }


def _svm(options: HogwildOptions) -> dict[str, dict[str, list[float]]]:
    """By task and locks: samples per second of one replica and of two, and their ratio."""

    def job(task: str, way: str, replicas: int) -> Callable[[], float]:
        return partial(
            _job, task, WAYS[way](replicas=replicas, optimizer=Optimizer("sgd", 0.5)), 1, options.svm_batch_size
        )

    contenders = {f"{task} {way} {count}": job(task, way, count) for task in SVMS for way in WAYS for count in (1, 2)}
    taken = interleave(contenders, options.repeats)
    found: dict[str, dict[str, list[float]]] = {}
    for task in SVMS:
        for way in WAYS:
            one, two = (taken[f"{task} {way} {count}"] for count in (1, 2))
            found.setdefault(task, {})[way] = [statistics.median(one), statistics.median(two), ratio(two, one)]
    return found


def _job(task: str, strategy: Mapped, epochs: int, batch_size: int) -> float:
    """Samples per second of a job's training: from its first minibatch dealt to its last step reported."""
    job = Job(task, strategy, epochs, batch_size, evaluate_every=0, checkpoint_every=0, snapshot_every="0")
    return float(workloads.run(job)["samples_per_second"])
