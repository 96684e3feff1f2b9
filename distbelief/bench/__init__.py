"""The benchmarks that the command `bench` runs, by name; each is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from distbelief.core.records import Json


class Bench(NamedTuple):
    """One benchmark: what it measures, and where its options and its `run(options)` are."""

    summary: str
    module: str
    options_name: str

    @property
    def options(self) -> type[Any]:
        """The dataclass of its options."""
        return getattr(importlib.import_module(self.module), self.options_name)  # type: ignore[no-any-return]  # a class of options, by its name

    def defaults(self, quick: bool) -> Any:
        """Its options where none is given; those that `--quick` makes shorter can still be given beside it."""
        return self.options(**(self.options.QUICK if quick else {}))

    def run(self, options: object) -> Json:
        """Run it; returns what it writes as JSON."""
        return importlib.import_module(self.module).run(options)  # type: ignore[no-any-return]  # a bench's result


BENCHES: Mapping[str, Bench] = {
    "wire": Bench(
        "push and fetch over each carrier, beside the limits of this machine", "distbelief.bench.wire", "WireOptions"
    ),
    "train": Bench(
        "samples per second of Downpour and allreduce beside single, DDP and Hogwild",
        "distbelief.bench.train",
        "TrainOptions",
    ),
    "allreduce": Bench(
        "all-reduce in shared memory and by schedules, beside gloo and the price",
        "distbelief.bench.allreduce",
        "AllreduceOptions",
    ),
    "hogwild": Bench(
        "replicas on one mapping beside a plain Hogwild loop, and what locks cost",
        "distbelief.bench.hogwild",
        "HogwildOptions",
    ),
    "straggle": Bench(
        "samples per second under stragglers, by what may be stale", "distbelief.bench.straggle", "StraggleOptions"
    ),
    "standby": Bench(
        "what a standby costs, and how long it takes to be its shard", "distbelief.bench.standby", "StandbyOptions"
    ),
    "loading": Bench(
        "what transforms of the data cost where they are loaded ahead of the step",
        "distbelief.bench.loading",
        "LoadingOptions",
    ),
    "start": Bench("seconds from starting a job to its first step", "distbelief.bench.start", "StartOptions"),
    "memory": Bench("flat vectors that a replica and a shard hold", "distbelief.bench.memory", "MemoryOptions"),
    "cost": Bench(
        "steps at unseen batch sizes and the memory of processes, beside what `cost` predicts",
        "distbelief.bench.cost",
        "CostBenchOptions",
    ),
    "plan": Bench(
        "candidates of a plan, predicted and trained with, and its first beside the best",
        "distbelief.bench.plan",
        "PlanBenchOptions",
    ),
    "split": Bench(
        "a model split over two processes, beside the whole one with one thread and two",
        "distbelief.bench.split",
        "SplitBenchOptions",
    ),
    "simulator": Bench(
        "messages per second of the virtual cluster, without payloads", "distbelief.bench.simulator", "SimulatorOptions"
    ),
    "sandblaster": Bench(
        "an iteration of L-BFGS, its ceiling, torch's, and backup portions",
        "distbelief.bench.sandblaster",
        "SandblasterOptions",
    ),
    "large": Bench(
        "test accuracy in minibatches of 4096: LARS beside SGD, tuned alike", "distbelief.bench.large", "LargeOptions"
    ),
    "accuracy": Bench(
        "test accuracy of Downpour beside single's, over several seeds", "distbelief.bench.accuracy", "AccuracyOptions"
    ),
}
"""Every benchmark, by name."""
