"""`bench split`: samples per second of a model that is split over two processes, beside the whole one with one thread
and with two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from distbelief.bench.parts import homes, loops
from distbelief.bench.parts.timing import check_models, figure, finish, interleave, number, ratio, show, spread
from distbelief.record.machine import machine

WORKLOADS = "distbelief.bench.parts.workloads:"
RATE = 0.001
"""Learning rate of every contender: plain SGD, slow enough that nobody diverges."""
CROSSES, CROSSES_SECONDS = 76_800, 10e-6
"""Bytes of what crosses in the MLP of 300 and 100 units for 64 samples, and in how many seconds it is to."""
CROSSINGS = 2000
"""Rounds in which they do, there and back."""
ONE, TWO, SPLIT = "whole, 1 thread", "whole, 2 threads", "split, 2 processes"


class SplitBenchModel(NamedTuple):
    """A model that is measured."""

    task: str
    split: str
    batch_size: int
    steps: int
    """In one turn."""
    promised: float
    """Of the whole with 1 thread."""
    ahead: bool
    """Whether it is to be ahead of the whole with 2 threads."""


ALEXNET = "alexnet"
MODELS: Mapping[str, SplitBenchModel] = {
    ALEXNET: SplitBenchModel("alexnet", "groups", 16, 8, 1.75, ahead=True),
    "wide": SplitBenchModel(f"{WORKLOADS}mlp_wide", "neurons", 64, 100, 1.4, ahead=False),
    "gru": SplitBenchModel("mnist-gru", "time", 64, 40, 1.45, ahead=True),
    "lenet": SplitBenchModel("mnist-lenet", "conv*=filters,fc*=neurons", 64, 60, 1.4, ahead=False),
    "mlp": SplitBenchModel("mnist", "neurons", 64, 400, 0.0, ahead=False),
}


HELD: Mapping[homes.How, float] = {
    homes.How("groups", 2): 0.52,
    homes.How("conv*=groups,fc*=neurons", 4): 0.28,
}
"""Splits of AlexNet, and how much of what the whole holds the largest partition may."""
MLP = homes.How("neurons")
HELD_STEPS = 3
"""After which that is looked at."""


@dataclass(frozen=True)
class SplitBenchOptions:
    """Options of `bench split`."""

    models: tuple[str, ...] = tuple(MODELS)
    """alexnet (two groups), wide (784-2048-2048-10, neurons), gru (by time), lenet (filters and neurons), mlp (neurons:
    it does not pay)."""
    repeats: int = 3
    """Rounds in which all contenders take their turns."""
    json: str | None = None
    """File to write the result to."""
    quick: bool = False
    """One short round: whether it runs, not how fast."""
    quiet: bool = False
    """Print nothing."""
    QUICK: ClassVar[Mapping[str, Any]] = {"repeats": 1, "models": ("mlp",)}
    """Defaults with --quick."""


def run(options: SplitBenchOptions) -> dict[str, Any]:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: an unknown model, or a number of repeats that cannot be.
        DataError: there is no MNIST.
    """
    check_models(options.models, MODELS)
    facts = machine()
    seconds = interleave(
        {"": partial(homes.crossing_seconds, CROSSES, 20 if options.quick else CROSSINGS)}, options.repeats
    )[""]
    measured = {model: _of_model(MODELS[model], options) for model in options.models}
    memory = _held(options) if options.quick or ALEXNET in options.models else {}
    figures = [figure(f"{CROSSES:,} bytes cross, seconds", statistics.median(seconds), CROSSES_SECONDS, lower=True)]
    for model, one in measured.items():
        if MODELS[model].promised:
            figures.append(figure(f"{model}: of the {ONE}", one["of_one"][SPLIT], MODELS[model].promised))
        if MODELS[model].ahead:
            figures.append(figure(f"{model}: of the {TWO}", one["of_two"][SPLIT], 1.0))
    for how, one in {} if options.quick else memory.items():
        what = f"alexnet, {how}: parameters, gradients and state of the largest partition, of the whole's"
        figures.append(figure(what, one["of_whole"], one["promised"], lower=True))
    result = {
        "bench": "split", "machine": facts, "repeats": options.repeats, "crossing_seconds": seconds, "models": measured,
        "memory": memory, "figures": figures,
    }  # fmt: skip
    if not options.quiet:
        for model, one in measured.items():
            _show(model, one)
        _show_held(memory)
    return finish(result, options)


def _of_model(model: SplitBenchModel, options: SplitBenchOptions) -> dict[str, Any]:
    task, steps = (f"{WORKLOADS}mlp_quick", 5) if options.quick else (model.task, model.steps)
    workload = loops.Workload(task, steps, model.batch_size, RATE)
    contenders: dict[str, Callable[[], float]] = {
        ONE: partial(loops.independent, workload, 1),
        TWO: partial(loops.independent, workload, 1, 2),
        SPLIT: partial(homes.split, workload, homes.How(model.split)),
    }
    taken = interleave(contenders, options.repeats)
    return {
        "task": task,
        "split": model.split,
        "batch_size": model.batch_size,
        "samples_per_second": {name: statistics.median(values) for name, values in taken.items()},
        "spread": {name: spread(values) for name, values in taken.items()},
        "of_one": {name: ratio(values, taken[ONE]) for name, values in taken.items()},
        "of_two": {name: ratio(values, taken[TWO]) for name, values in taken.items()},
    }


def _held(options: SplitBenchOptions) -> dict[str, Any]:
    """What partitions hold, and their processes at their peak, beside the whole model's."""
    task, splits = (MODELS[ALEXNET].task, HELD) if not options.quick else (f"{WORKLOADS}mlp_quick", {MLP: 1.0})
    workload = loops.Workload(task, HELD_STEPS, MODELS[ALEXNET].batch_size, RATE)
    [whole] = homes.held(workload, homes.How("", 1))
    found = {}
    for how, promised in splits.items():
        parts = homes.held(workload, how)
        largest = max(part.held for part in parts) / whole.held
        found[f"{how.split} over {how.partitions}"] = {
            "of_whole": largest, "promised": promised, "homes": parts, "whole": whole,
        }  # fmt: skip
    return found


def _show(model: str, one: dict[str, Any]) -> None:
    rows = [
        [name, number(rate), f"{one['spread'][name]:.0%}", *(number(one[key][name]) for key in ("of_one", "of_two"))]
        for name, rate in one["samples_per_second"].items()
    ]
    show(
        f"{model}: {one['split']}, {one['batch_size']} samples a step",
        ("", "samples/s", "+-", "of 1 thread", "of 2"),
        rows,
    )


def _show_held(memory: Mapping[str, dict[str, Any]]) -> None:
    for how, one in memory.items():
        rows = [["whole", *one["whole"]], *([f"partition {home}", *part] for home, part in enumerate(one["homes"]))]
        show(
            f"{how}: MB of parameters, gradients and state, and most that the process had in memory",
            ("", "held", "at its peak"),
            [[name, *(f"{size / 1e6:,.0f}" for size in sizes)] for name, *sizes in rows],
        )
