"""Replicas that update one memory beside a plain Hogwild loop; the cost of locks with sparse and dense gradients."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.parts import loops, workloads
from benchmarks.parts.timing import BenchOptions, Measured, Table, figure, interleave, rate_rows, rates, ratio
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.lab import number
from distbelief.strategies import Hogwild, Locking
from distbelief.strategies.parameter_server.options import InMemory
from distbelief.tasks import as_data, resolve

RATE = 0.01
"""Learning rate on the MLP: plain SGD, slow enough for all replicas to converge on a busy machine."""
WAYS: dict[str, Callable[..., InMemory]] = {
    "none": Hogwild,
    "8 shards": lambda **options: Locking(shards=8, **options),
    "one": Locking,
}
SVMS = ("sparse-svm", "dense-svm")
OURS, PLAIN, LOCKED = "hogwild, 2 replicas", "plain loop, 2 processes", "locking, 2 replicas"


@dataclass(frozen=True)
class HogwildOptions(BenchOptions):
    """Options of the benchmark hogwild."""

    repeats: int = 7
    """Rounds in which all contenders take turns."""
    epochs: int = 8
    """Passes over MNIST in one turn of the MLP, enough for the first step and the last report to weigh little."""
    batch_size: int = 64
    """Samples in a minibatch of the MLP."""
    svm_batch_size: int = 8
    """Samples in a minibatch of the support vector machines; with 1, as in the paper, steps would be mostly Python."""


def run(options: HogwildOptions) -> Measured:
    """Measure."""
    mlp, svm = _mlp(options), _svm(options)
    lines = [[f"{task}, locks {way}", *map(number, one)] for task, ways in svm.items() for way, one in ways.items()]
    return Measured(
        {"repeats": options.repeats, "mlp": mlp, "svm": svm},
        [figure(f"mlp: {OURS}, of {beside}", mlp["of_ours"][beside], 1.0) for beside in (PLAIN, LOCKED)],
        [
            Table(
                f"mlp: {mlp['samples']:,} samples a turn",
                ("", "samples/s", "+-", "hogwild relative to this"),
                rate_rows(mlp, mlp["of_ours"]),
            ),
            Table(
                f"support vector machines, minibatches of {options.svm_batch_size}",
                ("", "1 replica, samples/s", "2 replicas", "speed-up"),
                lines,
            ),
        ],
    )


def _mlp(options: HogwildOptions) -> Json:
    task = "benchmarks.parts.workloads:mlp_quick" if options.quick else "mnist"
    samples = len(as_data(resolve(task).train())) * options.epochs
    workload = loops.Workload(task, max(1, samples // options.batch_size // 2), options.batch_size, RATE)
    ours = partial(workloads.rate, task, epochs=options.epochs, batch_size=options.batch_size)
    contenders = {
        OURS: partial(ours, WAYS["none"](replicas=2, optimizer=Optimizer("sgd", RATE))),
        PLAIN: partial(loops.beside, workload, "hogwild"),
        LOCKED: partial(ours, WAYS["one"](replicas=2, optimizer=Optimizer("sgd", RATE))),
    }
    taken = interleave(contenders, options.repeats)
    return {
        "samples": samples,
        **rates(taken),
        "of_ours": {name: ratio(taken[OURS], values) for name, values in taken.items()},
    }


def _svm(options: HogwildOptions) -> dict[str, dict[str, list[float]]]:
    """Return by task and locks the samples per second of one replica, of two, and their ratio."""

    def job(task: str, way: str, replicas: int) -> Callable[[], float]:
        strategy = WAYS[way](replicas=replicas, optimizer=Optimizer("sgd", 0.5))
        return partial(workloads.rate, task, strategy, batch_size=options.svm_batch_size)

    trials = [(task, way, count) for task in SVMS for way in WAYS for count in (1, 2)]
    taken = interleave({" ".join(map(str, trial)): job(*trial) for trial in trials}, options.repeats)

    def speeds(one: list[float], two: list[float]) -> list[float]:
        return [statistics.median(one), statistics.median(two), ratio(two, one)]

    return {task: {way: speeds(taken[f"{task} {way} 1"], taken[f"{task} {way} 2"]) for way in WAYS} for task in SVMS}
