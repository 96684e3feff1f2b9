"""Samples per second of each path, compared with plain loops that do only the necessary work, and with DDP on gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.parts import loops, workloads
from benchmarks.parts.timing import (
    BenchOptions,
    Figure,
    Measured,
    Table,
    check_names,
    figure,
    interleave,
    rate_rows,
    rates,
    ratio,
)
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Bounded, Downpour, Single, Strategy, Synchronous
from distbelief.tasks import as_data, resolve

TASKS = {
    "mlp": ("mnist", "benchmarks.parts.workloads:mlp_quick"),
    "lenet": ("benchmarks.parts.workloads:lenet_short", "benchmarks.parts.workloads:lenet_quick"),
}
"""Task of each model, and its quick form."""
RATE = 0.01
"""Learning rate of every contender, slow enough for all to converge on a busy machine."""
SGD = Optimizer("sgd", RATE)
SINGLE, THREADS = "single, 1 thread", "single, 2 threads"
PAIR, LOCKSTEP = "two independent plain loops", "two plain loops in lockstep"
PLAIN_DIRECT, PLAIN_SERVED = "plain loop of two buffers", "plain loop with a server"
PLAIN_ROUNDS, PLAIN_ALLREDUCE = "plain loop of rounds", "plain loop of all-reduce"
SERVED = "downpour, 2 replicas, prefetch 0", "downpour, 2 replicas, prefetch 1"
SYNCHRONOUS = "synchronous, 2 replicas"
ALLREDUCE = "allreduce, 2 replicas"
DDP = "ddp on gloo, 2 ranks"
DIRECT = "downpour on the direct path"
BOUNDED = "bounded by 3 on the direct path, 2 replicas"
PLAIN = {
    **dict.fromkeys(SERVED, PLAIN_SERVED),
    **dict.fromkeys((f"{DIRECT}, 2 replicas", f"{DIRECT}, 2 replicas, 2 shards", BOUNDED), PLAIN_DIRECT),
    SYNCHRONOUS: PLAIN_ROUNDS,
    ALLREDUCE: PLAIN_ALLREDUCE,
}
"""Our contenders, each with the plain loop of its path."""
REFERENCES = {"pair": PAIR, "lockstep": LOCKSTEP, "2 threads": THREADS, "ddp": DDP, "single": SINGLE}
FIGURES = (
    ("mlp", (f"{DIRECT}, 2 replicas",), PLAIN_DIRECT, 0.95),
    ("lenet", (f"{DIRECT}, 2 replicas",), PLAIN_DIRECT, 0.95),
    ("lenet", SERVED, PAIR, 0.95),
    ("lenet", (SYNCHRONOUS,), LOCKSTEP, 0.95),
    *((model, ours, DDP, 1.0) for model in TASKS for ours in (SERVED, (ALLREDUCE,))),
)
"""Model, our contenders, the loop to compare with, and the target ratio; the fastest of our contenders counts."""


@dataclass(frozen=True)
class TrainOptions(BenchOptions):
    """Options of the benchmark train."""

    models: tuple[str, ...] = ("mlp", "lenet")
    """mlp (784-300-100-10, 1 ms a step) and lenet (20-50-500, 15 ms a step)."""
    repeats: int = 5
    """Rounds in which all contenders take turns."""
    replicas: tuple[int, ...] = (1, 2, 4)
    """Replicas of Downpour."""
    epochs: int = 4
    """Passes over the training data in one turn of mlp; lenet takes half of them, over less data."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    transport: str = "shared"
    """Carrier of Downpour: shared (memory) or tcp."""


def run(options: TrainOptions) -> Measured:
    """Measure."""
    check_names("model", options.models, TASKS)
    measured = {model: _of_model(model, options) for model in options.models}
    fields = {"repeats": options.repeats, "batch_size": options.batch_size, "transport": options.transport}
    return Measured(
        {**fields, "models": measured}, _figures(measured), [_table(model, one) for model, one in measured.items()]
    )


def _of_model(model: str, options: TrainOptions) -> Json:
    task = TASKS[model][options.quick]
    epochs = max(1, options.epochs // 2) if model == "lenet" else options.epochs
    samples = len(as_data(resolve(task).train())) * epochs

    def job(strategy: Strategy, threads: int = 1, path: str = "served") -> Callable[[], float]:
        place = Local(options.transport, path=path)
        return partial(
            workloads.rate, task, strategy, place, epochs=epochs, batch_size=options.batch_size, threads=threads
        )

    def downpour(replicas: int, prefetch: int = 0, path: str = "served", shards: int = 1) -> Callable[[], float]:
        return job(Downpour(replicas=replicas, shards=shards, optimizer=SGD, prefetch=prefetch), path=path)

    direct = partial(downpour, path="direct")
    half = loops.Workload(task, max(1, samples // options.batch_size // 2), options.batch_size, RATE)
    contenders: dict[str, Callable[[], float]] = {
        SINGLE: job(Single(optimizer=SGD)),
        THREADS: job(Single(optimizer=SGD), threads=2),
        PAIR: partial(loops.beside, half, "independent"),
        LOCKSTEP: partial(loops.beside, half, "in lockstep"),
        **{
            f"downpour, {replicas} replicas, prefetch {prefetch}": downpour(replicas, prefetch)
            for replicas in options.replicas
            for prefetch in (0, 1)
        },
        PLAIN_SERVED: partial(loops.beside, half, loops.SERVED),
        SYNCHRONOUS: job(Synchronous(replicas=2, shards=1, optimizer=SGD)),
        PLAIN_ROUNDS: partial(loops.beside, half, loops.ROUNDS),
        ALLREDUCE: job(Allreduce(replicas=2, optimizer=SGD)),
        PLAIN_ALLREDUCE: partial(loops.beside, half, "all-reduce"),
        DDP: partial(loops.ddp, half, 2),
        "ddp with our hook, shared, 2 ranks": partial(loops.ddp, half, 2, "shared"),
    }
    if options.transport == "shared":
        contenders |= {f"{DIRECT}, {replicas} replicas": direct(replicas) for replicas in options.replicas}
        contenders |= {f"{DIRECT}, 2 replicas, 2 shards": direct(2, shards=2)}
        contenders |= {BOUNDED: job(Bounded(replicas=2, shards=1, staleness=3, optimizer=SGD), path="direct")}
        contenders |= {PLAIN_DIRECT: partial(loops.beside, half, "two buffers")}
    taken = interleave(contenders, options.repeats)
    return {
        "task": task,
        "samples": samples,
        "turns": taken,
        **rates(taken),
        "of": {
            "plain": {ours: ratio(taken[ours], taken[plain]) for ours, plain in PLAIN.items() if ours in taken},
            **{
                beside: {name: ratio(values, taken[reference]) for name, values in taken.items()}
                for beside, reference in REFERENCES.items()
            },
        },
    }


def _figures(measured: Json) -> list[Figure]:
    """Return the target figures, round by round."""
    figures = []
    for model, ours, reference, promised in FIGURES:
        turns: dict[str, list[float]] = measured.get(model, {}).get("turns", {})
        shares = {name: ratio(turns[name], turns[reference]) for name in ours if name in turns}
        if shares:
            best = max(shares, key=shares.__getitem__)
            figures.append(figure(f"{model}: {best}, relative to {reference}", shares[best], promised))
    return figures


def _table(model: str, one: Json) -> Table:
    shares: dict[str, dict[str, float]] = one["of"]
    columns = ("", "samples/s", "+-", *shares)
    return Table(f"{model}: {one['samples']:,} samples a turn; relative to", columns, rate_rows(one, *shares.values()))
