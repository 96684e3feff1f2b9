"""`bench train`: samples per second of Downpour beside single, two independent singles, DDP on gloo and Hogwild."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from distbelief.bench.parts import loops, workloads
from distbelief.bench.parts.timing import figure, finish, interleave, number, ratio, show, spread
from distbelief.core.optimizer import Optimizer
from distbelief.errors import unknown
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.record.machine import machine
from distbelief.strategies import Allreduce, Downpour, Single, Strategy, Synchronous
from distbelief.tasks import as_data, resolve

TASKS = {
    "mlp": ("mnist", "distbelief.bench.parts.workloads:mlp_quick"),
    "lenet": ("distbelief.bench.parts.workloads:lenet_short", "distbelief.bench.parts.workloads:lenet_quick"),
}
"""The task of each model, and that of its quick form."""
RATE = 0.01
"""Learning rate of every contender: plain SGD, slow enough that nobody diverges on a crowded machine."""
PAIR = "two independent singles"
LOCKSTEP = "two singles in lockstep"
SYNCHRONOUS = "synchronous, 2 replicas"
ALLREDUCE = "allreduce, 2 replicas"
DIRECT = "downpour on the direct path"


@dataclass(frozen=True)
class TrainOptions:
    """Options of `bench train`."""

    models: tuple[str, ...] = ("mlp", "lenet")
    """mlp (784-300-100-10, 1 ms a step) and lenet (20-50-500, 15 ms a step)."""
    repeats: int = 5
    """Rounds in which all contenders take their turns."""
    replicas: tuple[int, ...] = (1, 2, 4)
    """Replicas of Downpour."""
    epochs: int = 4
    """Passes over the training data in one turn of mlp; lenet takes half of them, over less data."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    transport: str = "shared"
    """How Downpour's bytes travel: shared (memory) or tcp."""
    json: str | None = None
    """File to write the result to."""
    quick: bool = False
    """One short round: whether it runs, not how fast."""
    quiet: bool = False
    """Print nothing."""
    QUICK: ClassVar[Mapping[str, Any]] = {"repeats": 1, "epochs": 1}
    """Defaults with --quick."""


def run(options: TrainOptions) -> dict[str, Any]:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: an unknown model, or a number of repeats that cannot be.
        DataError: there is no MNIST.
    """
    for model in options.models:
        if model not in TASKS:
            raise unknown("model", model, TASKS)
    facts = machine()
    measured = {model: _of_model(model, options) for model in options.models}
    result = {"bench": "train", "machine": facts, "repeats": options.repeats, "batch_size": options.batch_size,
              "transport": options.transport, "models": measured, "figures": _figures(measured)}  # fmt: skip
    if not options.quiet:
        for model, one in measured.items():
            _show(model, one)
    return finish(result, options)


def _of_model(model: str, options: TrainOptions) -> dict[str, Any]:
    task = TASKS[model][options.quick]
    epochs = max(1, options.epochs // 2) if model == "lenet" else options.epochs
    samples = len(as_data(resolve(task).train())) * epochs
    steps = samples // options.batch_size

    def job(strategy: Strategy, threads: int = 1, path: str = "served") -> Callable[[], float]:
        made = Job(
            task=task,
            strategy=strategy,
            epochs=epochs,
            batch_size=options.batch_size,
            threads=threads,
            evaluate_every=0,
            checkpoint_every=0,
        )
        return partial(_job, made, Local(options.transport, path=path))

    def downpour(replicas: int, prefetch: int = 0, path: str = "served") -> Callable[[], float]:
        strategy = Downpour(replicas=replicas, shards=1, optimizer=Optimizer("sgd", RATE), prefetch=prefetch)
        return job(strategy, path=path)

    alone, halved = (loops.Workload(task, count, options.batch_size, RATE) for count in (steps, max(1, steps // 2)))
    contenders: dict[str, Callable[[], float]] = {
        "single, 1 thread": job(Single(optimizer=Optimizer("sgd", RATE))),
        "single, 2 threads": job(Single(optimizer=Optimizer("sgd", RATE)), threads=2),
        PAIR: partial(loops.independent, alone, 2),
        LOCKSTEP: partial(loops.lockstep, alone, 2),
        **{
            f"downpour, {replicas} replicas, prefetch {prefetch}": downpour(replicas, prefetch)
            for replicas in options.replicas
            for prefetch in (0, 1)
        },
        **{
            f"{DIRECT}, {replicas} replicas": downpour(replicas, path="direct")
            for replicas in options.replicas
            if options.transport == "shared"
        },
        SYNCHRONOUS: job(Synchronous(replicas=2, shards=1, optimizer=Optimizer("sgd", RATE))),
        ALLREDUCE: job(Allreduce(replicas=2, optimizer=Optimizer("sgd", RATE))),
        "ddp on gloo, 2 ranks": partial(loops.ddp, halved, 2),
        "ddp with our hook, ring, 2 ranks": partial(loops.ddp, halved, 2, "ring"),
        "ddp with our hook, shared, 2 ranks": partial(loops.ddp, halved, 2, "shared"),
        "hogwild, 2 processes": partial(loops.hogwild, halved, 2),
    }
    taken = interleave(contenders, options.repeats)
    return {
        "task": task,
        "samples": samples,
        "samples_per_second": {name: statistics.median(values) for name, values in taken.items()},
        "spread": {name: spread(values) for name, values in taken.items()},
        "of_single": {name: ratio(values, taken["single, 1 thread"]) for name, values in taken.items()},
        "of_pair": {name: ratio(values, taken[PAIR]) for name, values in taken.items()},
        "of_ddp": {name: ratio(values, taken["ddp on gloo, 2 ranks"]) for name, values in taken.items()},
    }


def _job(job: Job, place: Local) -> float:
    """Samples per second of a job's training: from its first minibatch dealt to its last step reported."""
    return float(workloads.run(job, place)["samples_per_second"])


def _figures(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The promised figures; Downpour's with each of its two settings of prefetch, of which the better is to reach what
    is promised.
    """
    figures = []
    for model, key, against, promised in (
        ("mlp", "of_single", "single, 1 thread", 1.55),
        ("lenet", "of_pair", PAIR, 0.96),
    ):
        names = [f"downpour, 2 replicas, prefetch {prefetch}" for prefetch in (0, 1)]
        if (one := measured.get(model)) and names[0] in one[key]:
            for name in names:
                figures.append(figure(f"{model}: {name}, of {against}", one[key][name], promised))
                figures.append(figure(f"{model}: {name}, of ddp on gloo, 2 ranks", one["of_ddp"][name], 1.0))
    for model, key, against, promised in (
        ("mlp", "of_single", "single, 1 thread", 1.8),
        ("lenet", "of_pair", PAIR, 0.97),
    ):
        name = f"{DIRECT}, 2 replicas"
        if (one := measured.get(model)) and name in one[key]:
            figures.append(figure(f"{model}: {name}, of {against}", one[key][name], promised))
    for model, of_ddp, of_pair in (("mlp", 1.2, 0.85), ("lenet", 1.0, 0.96)):
        found: dict[str, Any] = measured.get(model, {})
        if found:
            figures.append(figure(f"{model}: {ALLREDUCE}, of ddp on gloo, 2 ranks", found["of_ddp"][ALLREDUCE], of_ddp))
            figures.append(figure(f"{model}: {ALLREDUCE}, of {PAIR}", found["of_pair"][ALLREDUCE], of_pair))
    if lenet := measured.get("lenet"):
        figures.append(figure(f"lenet: {SYNCHRONOUS}, of {PAIR}", lenet["of_pair"][SYNCHRONOUS], 0.93))
    return figures


def _show(model: str, one: dict[str, Any]) -> None:
    rows = [
        [
            name,
            number(rate),
            f"{one['spread'][name]:.0%}",
            *(number(one[key][name]) for key in ("of_single", "of_pair", "of_ddp")),
        ]
        for name, rate in one["samples_per_second"].items()
    ]
    show(
        f"{model}: {one['samples']:,} samples a turn",
        ("", "samples/s", "+-", "of single", "of the pair", "of ddp"),
        rows,
    )
