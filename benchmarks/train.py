"""`bench train`: samples per second of Downpour beside single, two independent singles, DDP on gloo and Hogwild."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from benchmarks.parts import loops, workloads
from benchmarks.parts.timing import BenchOptions, Figure, check_models, figure, finish, interleave, rates, ratio
from distbelief.cli.tables import number, show
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.record.machine import machine
from distbelief.strategies import Allreduce, Bounded, Downpour, Single, Strategy, Synchronous
from distbelief.tasks import as_data, resolve

TASKS = {
    "mlp": ("mnist", "benchmarks.parts.workloads:mlp_quick"),
    "lenet": ("benchmarks.parts.workloads:lenet_short", "benchmarks.parts.workloads:lenet_quick"),
}
"""The task of each model, and that of its quick form."""
RATE = 0.01
"""Learning rate of every contender, slow enough that nobody diverges on a crowded machine."""
SGD, ADAGRAD = Optimizer("sgd", RATE), Optimizer("adagrad", RATE)
SINGLE = "single, 1 thread"
PAIR = "two independent singles"
LOCKSTEP = "two singles in lockstep"
SYNCHRONOUS = "synchronous, 2 replicas"
ALLREDUCE = "allreduce, 2 replicas"
DDP = "ddp on gloo, 2 ranks"
DIRECT = "downpour on the direct path"
BOUNDED = "bounded by 3 on the direct path, 2 replicas"
SINGLE_ADAGRAD, DIRECT_ADAGRAD = "single with adagrad", f"{DIRECT} with adagrad, 2 replicas"
FIGURES = (
    *(
        one
        for served in ("downpour, 2 replicas, prefetch 0", "downpour, 2 replicas, prefetch 1")
        for one in (
            ("mlp", served, SINGLE, 1.55), ("mlp", served, DDP, 1.0),
            ("lenet", served, PAIR, 0.96), ("lenet", served, DDP, 1.0),
        )
    ),
    ("mlp", f"{DIRECT}, 2 replicas", SINGLE, 1.8), ("mlp", f"{DIRECT}, 2 replicas", "single, 2 threads", 1.0),
    ("mlp", f"{DIRECT}, 2 replicas, 2 shards", SINGLE, 1.7), ("mlp", f"{DIRECT}, 4 replicas", SINGLE, 1.6),
    ("mlp", DIRECT_ADAGRAD, SINGLE_ADAGRAD, 1.6), ("mlp", SYNCHRONOUS, SINGLE, 1.5),
    ("lenet", f"{DIRECT}, 2 replicas", PAIR, 0.97), ("lenet", SYNCHRONOUS, PAIR, 0.95),
    ("lenet", BOUNDED, PAIR, 0.97),
    ("mlp", ALLREDUCE, DDP, 1.2), ("mlp", ALLREDUCE, PAIR, 0.85),
    ("lenet", ALLREDUCE, DDP, 1.0), ("lenet", ALLREDUCE, PAIR, 0.96),
)  # fmt: skip
"""Of which model, what of what, and the promise. Of Downpour's two settings of prefetch the better is to reach it."""


@dataclass(frozen=True)
class TrainOptions(BenchOptions):
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
    QUICK: ClassVar[Mapping[str, object]] = {"repeats": 1, "epochs": 1}
    """Defaults with --quick."""


def run(options: TrainOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: an unknown model, or a number of repeats that cannot be.
        DataError: there is no MNIST.
    """
    check_models(options.models, TASKS)
    facts = machine()
    measured = {model: _of_model(model, options) for model in options.models}
    result = {"bench": "train", "machine": facts, "repeats": options.repeats, "batch_size": options.batch_size,
              "transport": options.transport, "models": measured, "figures": _figures(measured)}  # fmt: skip
    if not options.quiet:
        for model, one in measured.items():
            _show(model, one)
    return finish(result, options)


def _of_model(model: str, options: TrainOptions) -> Json:
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

    def downpour(
        replicas: int, prefetch: int = 0, path: str = "served", shards: int = 1, optimizer: Optimizer = SGD
    ) -> Callable[[], float]:
        return job(Downpour(replicas=replicas, shards=shards, optimizer=optimizer, prefetch=prefetch), path=path)

    direct = partial(downpour, path="direct")
    shares = options.transport == "shared"
    alone, halved = (loops.Workload(task, count, options.batch_size, RATE) for count in (steps, max(1, steps // 2)))
    contenders: dict[str, Callable[[], float]] = {
        SINGLE: job(Single(optimizer=SGD)),
        "single, 2 threads": job(Single(optimizer=SGD), threads=2),
        PAIR: partial(loops.independent, alone, 2),
        LOCKSTEP: partial(loops.lockstep, alone, 2),
        **{
            f"downpour, {replicas} replicas, prefetch {prefetch}": downpour(replicas, prefetch)
            for replicas in options.replicas
            for prefetch in (0, 1)
        },
        **{f"{DIRECT}, {replicas} replicas": direct(replicas) for replicas in options.replicas if shares},
        **({f"{DIRECT}, 2 replicas, 2 shards": direct(2, shards=2)} if shares else {}),
        **({BOUNDED: job(Bounded(replicas=2, shards=1, staleness=3, optimizer=SGD), path="direct")} if shares else {}),
        SINGLE_ADAGRAD: job(Single(optimizer=ADAGRAD)),
        **({DIRECT_ADAGRAD: direct(2, optimizer=ADAGRAD)} if shares else {}),
        SYNCHRONOUS: job(Synchronous(replicas=2, shards=1, optimizer=SGD)),
        ALLREDUCE: job(Allreduce(replicas=2, optimizer=SGD)),
        DDP: partial(loops.ddp, halved, 2),
        "ddp with our hook, ring, 2 ranks": partial(loops.ddp, halved, 2, "ring"),
        "ddp with our hook, shared, 2 ranks": partial(loops.ddp, halved, 2, "shared"),
        "hogwild, 2 processes": partial(loops.hogwild, halved, 2),
    }
    taken = interleave(contenders, options.repeats)
    return {
        "task": task,
        "samples": samples,
        "turns": taken,
        **rates(taken),
        "of_single": {name: ratio(values, taken[SINGLE]) for name, values in taken.items()},
        "of_pair": {name: ratio(values, taken[PAIR]) for name, values in taken.items()},
        "of_ddp": {name: ratio(values, taken[DDP]) for name, values in taken.items()},
    }


def _job(job: Job, place: Local) -> float:
    """Samples per second of a job's training: from its first minibatch dealt to its last step reported."""
    return float(workloads.run(job, place)["samples_per_second"])


def _figures(measured: Json) -> list[Figure]:
    """The promised figures of what was measured, round by round."""
    figures = []
    for model, what, against, promised in FIGURES:
        turns: dict[str, list[float]] = measured.get(model, {}).get("turns", {})
        if what in turns:
            figures.append(figure(f"{model}: {what}, of {against}", ratio(turns[what], turns[against]), promised))
    return figures


def _show(model: str, one: Json) -> None:
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
