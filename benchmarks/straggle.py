"""Samples per second of strategies under stragglers; sleeps pad the steps, so that few cores run many replicas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from benchmarks.parts import workloads
from benchmarks.parts.timing import BenchOptions, Figure, Measured, Table, figure, interleave, rate_rows, rates, ratio
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous

FACTOR, CHANCE, TAIL = 4.0, 0.05, 10.0
"""Factor of the slow replica; probability and factor of a slow step."""
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class StraggleOptions(BenchOptions):
    """Options of the benchmark straggle."""

    task: str = "digits"
    """Task to train, whose own step should be much shorter than the pad."""
    replicas: int = 4
    """Replicas of every strategy, including backup workers."""
    epochs: int = 4
    """Passes over the training set in one turn."""
    batch_size: int = 16
    """Samples in a minibatch of one replica."""
    pad: float = 0.03
    """Least seconds of a step."""
    repeats: int = 3
    """Rounds in which all strategies take turns."""


def run(options: StraggleOptions) -> Measured:
    """Measure."""
    if options.replicas < 2 or not options.pad >= 0:
        raise UsageError(f"--replicas {options.replicas} --pad {options.pad}: must be 2 or more, and 0 or more")
    pad, replicas = options.pad, options.replicas
    scenarios = {
        f"one replica always {FACTOR:g} times slower": ComputeModel(
            step=pad, spread="constant", slow={replicas - 1: FACTOR}
        ),
        f"{CHANCE:.0%} of the steps {TAIL:g} times slower": ComputeModel(
            step=pad, spread="constant", straggle_chance=CHANCE, straggle_factor=TAIL
        ),
    }
    measured = {}
    for name, compute in scenarios.items():
        rate = partial(workloads.rate, options.task, epochs=options.epochs, batch_size=options.batch_size)
        turns = {what: partial(rate, made, Local(compute=compute)) for what, made in _strategies(replicas).items()}
        taken = interleave(turns, options.repeats)
        measured[name] = {
            **rates(taken),
            "of_synchronous": {strategy: ratio(values, taken[SYNCHRONOUS]) for strategy, values in taken.items()},
        }
    where, columns = f"{replicas} replicas, steps of {1000 * pad:g} ms", ("", "samples/s", "+-", "of synchronous")
    tables = [
        Table(f"{name}: {where}", columns, rate_rows(one, one["of_synchronous"])) for name, one in measured.items()
    ]
    fields = {"task": options.task, "replicas": replicas, "pad": pad, "batch_size": options.batch_size}
    return Measured({**fields, "repeats": options.repeats, "scenarios": measured}, _figures(measured), tables)


def _strategies(replicas: int) -> dict[str, Strategy]:
    sgd = optim("sgd", lr=0.01)
    synchronous = Synchronous(replicas=replicas, shards=1, optimizer=sgd)
    return {
        SYNCHRONOUS: synchronous,
        "synchronous, 1 backup worker": dataclasses.replace(synchronous, backup_workers=1),
        "bounded, staleness 3": Bounded(replicas=replicas, shards=1, optimizer=sgd, staleness=3),
        "softsync, n 1": Softsync(replicas=replicas, shards=1, optimizer=sgd, n=1),
        "downpour": Downpour(replicas=replicas, shards=1, optimizer=sgd),
    }


def _figures(measured: Json) -> list[Figure]:
    """Return the target figures: how much faster strategies are than synchronous."""
    ahead = ["downpour", "synchronous, 1 backup worker", "bounded, staleness 3"]
    # if one replica is always slow, the others wait for it under a bound too
    return [
        figure(f"{name}: {strategy}, of synchronous", one["of_synchronous"][strategy], 1.0)
        for number_of, (name, one) in enumerate(measured.items())
        for strategy in ahead[: 2 + number_of]
    ]
