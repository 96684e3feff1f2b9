"""Benchmarks of this machine by name, each imported when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from distbelief.core.records import Json


class Bench(NamedTuple):
    """Benchmark: its module in this package, the class of its options, and what it measures."""

    module: str
    options_name: str
    summary: str

    @property
    def options(self) -> type[Any]:
        """Return the dataclass of its options."""
        return getattr(self._imported(), self.options_name)  # type: ignore[no-any-return]  # a class, by its name

    def defaults(self, quick: bool) -> Any:
        """Return its default options; with `--quick` some are shorter unless they are given."""
        return self.options(**(QUICK[self.module] if quick else {}))

    def run(self, options: Any) -> Json:
        """Run it, and return its result as JSON."""
        from benchmarks.parts.timing import report

        return report(self.module, self._imported().run, options)

    def _imported(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.module}")


BENCHES: Mapping[str, Bench] = {
    bench.module: bench
    for bench in (
        Bench("wire", "WireOptions", "push and fetch over each carrier, beside the limits of this machine"),
        Bench("train", "TrainOptions", "samples per second of each path beside plain loops, single and DDP"),
        Bench("allreduce", "AllreduceOptions", "all-reduce in shared memory and by schedules, beside gloo"),
        Bench("hogwild", "HogwildOptions", "replicas on one memory beside a plain loop, and what locks cost"),
        Bench("straggle", "StraggleOptions", "samples per second under stragglers, by what may be stale"),
        Bench("local", "LocalStepsOptions", "local steps beside gradients: loss, bytes, slow lines, speeds, storms"),
        Bench("standby", "StandbyOptions", "what a standby costs, and how long it takes to replace its shard"),
        Bench("loading", "LoadingOptions", "what data transforms cost when loaded ahead of the step"),
        Bench("start", "StartOptions", "seconds from starting a job to its first step, beside importing torch"),
        Bench("memory", "MemoryOptions", "flat vectors that a replica and a shard hold"),
        Bench("cost", "CostBenchOptions", "steps and memory of processes, beside what `cost` predicts"),
        Bench("plan", "PlanBenchOptions", "the first of a plan beside the best of its candidates"),
        Bench("split", "SplitBenchOptions", "a split model, beside the whole one with one thread and two"),
        Bench("simulator", "SimulatorOptions", "messages per second of the virtual cluster, without payloads"),
        Bench("sandblaster", "SandblasterOptions", "an iteration of L-BFGS, its ceiling, and torch's"),
    )
}

QUICK: Mapping[str, Mapping[str, object]] = {
    "wire": {"sizes": (4 << 10, 256 << 10), "repeats": 3, "seconds": 0.002},
    "train": {"repeats": 1, "epochs": 1},
    "allreduce": {"sizes": (100_000,), "ranks": (2,), "repeats": 1},
    "hogwild": {"repeats": 1, "epochs": 1, "svm_batch_size": 512},
    "straggle": {"pad": 0.002, "epochs": 1, "repeats": 1},
    "local": {"parts": ("loss", "speeds"), "steps": 5, "epochs": 1, "seeds": 1, "batch_size": 64},
    "standby": {"task": "benchmarks.parts.workloads:lenet_quick", "repeats": 1},
    "loading": {"repeats": 1, "epochs": 1},
    "start": {"task": "digits", "repeats": 1},
    "memory": {"epochs": 3},
    "cost": {"models": ("mlp",), "seconds": 2.0},
    "plan": {"models": ("mlp",), "repeats": 1, "seconds": 0.5},
    "split": {"repeats": 1, "models": ("mlp",), "microbatches": (4,)},
    "simulator": {"replicas": 50, "repeats": 1},
    "sandblaster": {"task": "benchmarks.parts.workloads:mlp_quick", "portion_size": 64, "repeats": 1, "iterations": 3},
}
