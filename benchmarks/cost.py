"""Measured steps at unprofiled batch sizes, and measured memory of processes, compared with predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from benchmarks.parts import iterations
from benchmarks.parts.timing import BenchOptions, Measured, Table, check_names, figure
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.lab import number
from distbelief.lab.cost import profile
from distbelief.lab.cost.cost import sample_of
from distbelief.lab.cost.profile import ladder
from distbelief.lab.cost.trace import Tracer
from distbelief.tasks import as_data, resolve

ERROR = 0.10
"""Largest error of a step, and of the memory of a large model."""
SMALL, SMALL_ERROR, SMALL_BYTES = 200e6, 0.15, 8e6
"""Bytes below which a process is small, and its allowed error: the larger of this share and these bytes."""


class Sizes(NamedTuple):
    """Batch sizes of a model."""

    task: str
    seen: Sequence[int]
    """Profiled sizes."""
    unseen: tuple[int, ...]
    """Predicted sizes, up to four times the largest profiled one."""


MODELS = {
    "mlp": Sizes("mnist", ladder(256), (3, 8, 32, 128, 512, 1024)),
    "lenet": Sizes("mnist-lenet", ladder(64), (3, 8, 32, 128, 256)),
    "alexnet": Sizes("alexnet", ladder(16), (3, 8, 32, 64)),
}
QUICK = {name: Sizes(sizes.task, (1, 4), (2,)) for name, sizes in MODELS.items()}


class HeldMemory(NamedTuple):
    """Iterations whose memory is measured."""

    task: str
    batch_size: int
    optimizer: str


MEMORY = {
    "mlp": (HeldMemory("mnist", 1024, "sgd"),),
    "lenet": (HeldMemory("mnist-lenet", 1024, "sgd"),),
    "alexnet": (HeldMemory("alexnet", 1, "sgd"), HeldMemory("alexnet", 64, "sgd"), HeldMemory("alexnet", 64, "adam")),
}


@dataclass(frozen=True)
class CostBenchOptions(BenchOptions):
    """Options of the benchmark cost."""

    models: tuple[str, ...] = ("mlp", "lenet", "alexnet")
    """Models to measure: mlp, lenet and alexnet."""
    seconds: float = 60.0
    """Seconds for the steps of each model."""


def run(options: CostBenchOptions) -> Measured:
    """Measure."""
    check_names("model", options.models, MODELS)
    sizes = QUICK if options.quick else MODELS
    steps = {name: _steps(sizes[name], options.seconds) for name in options.models}
    memory = {
        f"{one.task} {one.batch_size} {one.optimizer}": _memory(one) for name in options.models for one in MEMORY[name]
    }
    figures = [
        figure(f"{name}: a step at an unseen batch size, median error", one["median_error"], ERROR, lower=True)
        for name, one in steps.items()
    ]
    figures += [
        figure(f"{name}: peak memory, error", one["error"], _allowed(one["process"]), lower=True)
        for name, one in memory.items()
    ]
    return Measured({"steps": steps, "memory": memory}, figures, _tables(steps, memory))


def _allowed(process: float) -> float:
    """Return the allowed error of a predicted memory.

    >>> _allowed(1e9), _allowed(16e6)
    (0.1, 0.5)
    """
    return ERROR if process > SMALL else max(SMALL_ERROR, SMALL_BYTES / process)


def _steps(sizes: Sizes, seconds: float) -> Json:
    """Measure steps at all sizes in turns; unprofiled ones are compared with lines between the others."""
    task = resolve(sizes.task)
    tracer = Tracer(task, sample_of(as_data(task.train())))
    names, tried = [layer.name for layer in tracer.layers], sorted((*sizes.seen, *sizes.unseen))
    found = profile.measure(task, names, dict.fromkeys(tried, ""), seconds)
    seen = msgspec.structs.replace(found, points=[one for one in found.points if one.batch_size in sizes.seen])
    rows = {
        str(one.batch_size): {
            "measured": one.step,
            "predicted": (told := seen.at(one.batch_size, tracer.mapped).step),
            "error": abs(told / one.step - 1),
        }
        for one in found.points
        if one.batch_size in sizes.unseen
    }
    errors = [row["error"] for row in rows.values()]
    return {
        "rows": rows,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "busy": found.busy,
        "left_out": {str(size): why for size, why in found.left_out.items()},
    }


def _memory(one: HeldMemory) -> dict[str, float]:
    """Compare the bytes of a trace with those of a process."""
    task = resolve(one.task)
    traced = Tracer(task, sample_of(as_data(task.train()))).follow(one.batch_size, optim(one.optimizer)).peak
    process = iterations.peak(one.task, one.batch_size, one.optimizer)
    return {"traced": traced, "process": process, "error": abs(traced / process - 1)}


def _tables(steps: Json, memory: Mapping[str, Mapping[str, float]]) -> list[Table]:
    rows = [
        [f"{name}, {size}", number(1e3 * row["measured"]), number(1e3 * row["predicted"]), f"{row['error']:.1%}"]
        for name, one in steps.items()
        for size, row in one["rows"].items()
    ]
    needed = [
        [name, number(one["process"] / 1e6), number(one["traced"] / 1e6), f"{one['error']:.1%}"]
        for name, one in memory.items()
    ]
    return [
        Table("a step at unseen batch sizes, ms", ("", "measured", "predicted", "error"), rows),
        Table("peak memory, MB", ("", "process", "trace", "error"), needed),
    ]
