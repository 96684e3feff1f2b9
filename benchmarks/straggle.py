"""Samples per second under stragglers, by what may be stale: steps are padded by sleeps, so that few
cores hold many replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from benchmarks.parts import workloads
from benchmarks.parts.timing import BenchOptions, Figure, figure, finish, interleave, rates, ratio
from distbelief.cli.tables import number, show
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.local import Local
from distbelief.record.machine import machine
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous

FACTOR, CHANCE, TAIL = 4.0, 0.05, 10.0
"""How many times slower the slow replica is; the chance of a slow step, and how many times longer that takes."""
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class StraggleOptions(BenchOptions):
    """Options of the benchmark straggle."""

    task: str = "digits"
    """What is trained; its own step should be much shorter than the pad."""
    replicas: int = 4
    """Replicas of every strategy; one of them is the backup worker of the one that has one."""
    epochs: int = 4
    """Passes over the training set in one turn."""
    batch_size: int = 16
    """Samples in a minibatch of one replica."""
    pad: float = 0.03
    """Least seconds of a step."""
    repeats: int = 3
    """Rounds in which all strategies take their turns."""
    QUICK: ClassVar[Mapping[str, object]] = {"pad": 0.002, "epochs": 1, "repeats": 1}
    """Defaults with --quick."""


def run(options: StraggleOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: fewer than two replicas, or a pad that is none.
    """
    if options.replicas < 2 or not options.pad >= 0:
        raise UsageError(f"--replicas {options.replicas} --pad {options.pad}: must be 2 or more, and 0 or more")
    facts = machine()
    pad, repeats = options.pad, options.repeats
    scenarios = {
        f"one replica always {FACTOR:g} times slower": ComputeModel(
            step=pad, spread="constant", slow={options.replicas - 1: FACTOR}
        ),
        f"{CHANCE:.0%} of the steps {TAIL:g} times slower": ComputeModel(
            step=pad, spread="constant", straggle_chance=CHANCE, straggle_factor=TAIL
        ),
    }
    measured = {}
    for name, compute in scenarios.items():
        turns = {
            strategy: partial(_rate, made, compute, options) for strategy, made in _strategies(options.replicas).items()
        }
        taken = interleave(turns, repeats)
        measured[name] = {
            **rates(taken),
            "of_synchronous": {strategy: ratio(values, taken[SYNCHRONOUS]) for strategy, values in taken.items()},
        }
    result = {"bench": "straggle", "machine": facts, "task": options.task, "replicas": options.replicas, "pad": pad,
        "batch_size": options.batch_size,
              "repeats": repeats, "scenarios": measured, "figures": _figures(measured)}  # fmt: skip
    if not options.quiet:
        for name, one in measured.items():
            rows = [
                [strategy, number(rate), f"{one['spread'][strategy]:.0%}", number(one["of_synchronous"][strategy])]
                for strategy, rate in one["samples_per_second"].items()
            ]
            show(
                f"{name}: {options.replicas} replicas, steps of {1000 * pad:g} ms",
                ("", "samples/s", "+-", "of synchronous"),
                rows,
            )
    return finish(result, options)


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


def _rate(strategy: Strategy, compute: ComputeModel, options: StraggleOptions) -> float:
    job = Job(
        task=options.task,
        strategy=strategy,
        epochs=options.epochs,
        batch_size=options.batch_size,
        evaluate_every=0,
        checkpoint_every=0,
    )
    return float(workloads.run(job, Local(compute=compute))["samples_per_second"])


def _figures(measured: Json) -> list[Figure]:
    """Each is ahead of synchronous where the issue of stragglers says so."""
    figures = []
    for number_of, (name, one) in enumerate(measured.items()):
        ahead = ["downpour", "synchronous, 1 backup worker", *(["bounded, staleness 3"] if number_of else [])]
        figures += [
            figure(f"{name}: {strategy}, of synchronous", one["of_synchronous"][strategy], 1.0) for strategy in ahead
        ]
    return figures
