"""Samples per second of a model split over two processes, compared with the whole model and with torch's own ways."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmarks.parts import loops, partitions, torch_split
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
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.lab import number
from distbelief.tasks.worker import placed

WORKLOADS = "benchmarks.parts.workloads:"
RATE = 0.001
"""Learning rate of every contender: plain SGD, slow enough for all to converge."""
CROSSES, COPIES = 76_800, 3.0
"""Bytes that cross in the MLP for 64 samples, and their largest time relative to copying them in and out."""
CROSSINGS = 2000
"""Rounds in which these bytes cross, there and back."""
ONE, TWO, SPLIT = "whole, 1 thread", "whole, 2 threads", "split, 2 processes"


class SplitBenchModel(NamedTuple):
    """A model to measure."""

    task: str
    split: str
    batch_size: int
    steps: int
    """Samples in one turn."""
    promised: float
    """Target speed relative to the whole model with 1 thread."""
    ahead: bool
    """Whether it must be faster than the whole model with 2 threads."""
    chunks: int = 0
    """Number of chunks of a sequence."""

    @property
    def how(self) -> partitions.How:
        """Return the split of the model."""
        return partitions.How(self.split, chunks=self.chunks)


ALEXNET = "alexnet"
MODELS: Mapping[str, SplitBenchModel] = {
    ALEXNET: SplitBenchModel("alexnet", "groups", 16, 8, 1.75, ahead=True),
    "wide": SplitBenchModel(f"{WORKLOADS}mlp_wide", "neurons", 64, 100, 1.4, ahead=False),
    "gru": SplitBenchModel("mnist-gru", "time", 64, 40, 1.45, ahead=True, chunks=7),
    "lenet": SplitBenchModel("mnist-lenet", "conv*=filters,fc*=neurons", 64, 60, 1.4, ahead=False),
    "mlp": SplitBenchModel("mnist", "neurons", 64, 400, 0.0, ahead=False),
}
PARTS = (CROSSING, WHOLE, MEMORY, PIPELINES, TENSORS) = ("crossing", "whole", "memory", "pipelines", "tensors")
ON_DEVICE = (CROSSING, WHOLE)
"""Parts that are measured on other devices too, without targets."""
AS_PIPELINES: Mapping[str, float] = {"mlp": 1.3, "wide": 0.97, "alexnet": 0.97}
"""Target speed of our pipeline relative to torch's stages."""
AS_TENSORS: Mapping[str, float] = {"mlp": 2.5, "wide": 1.0}
"""Target speed of our neurons relative to torch's tensors by columns and rows."""
HELD: Mapping[partitions.How, float] = {
    partitions.How("groups", 2): 0.52,
    partitions.How("conv*=groups,fc*=neurons", 4): 0.28,
}
"""Splits of AlexNet, each with the largest share of the whole memory that a partition may need."""
MLP = partitions.How("neurons")
HELD_STEPS = 3
"""Steps before the memory is measured."""


@dataclass(frozen=True)
class SplitBenchOptions(BenchOptions):
    """Options of the benchmark split."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models: alexnet (two groups), wide (784-2048-2048-10, neurons), gru (by time), lenet (filters and neurons), mlp
    (neurons, where a split does not pay).
    """
    parts: tuple[str, ...] = PARTS
    """Parts to measure: crossing (time of a message), whole (relative to the whole model), memory (of AlexNet's
    partitions), pipelines (mlp, wide and alexnet in stages, relative to torch's), tensors (mlp and wide by neurons,
    relative to torch's by columns and rows).
    """
    microbatches: tuple[int, ...] = (1, 4, 8)
    """Microbatches of a minibatch, in pipelines."""
    device: str = "cpu"
    """cpu; or cuda, for crossing and whole on GPUs, which the partitions take in turn."""
    repeats: int = 3
    """Rounds in which all contenders take turns."""


def run(options: SplitBenchOptions) -> Measured:
    """Measure."""
    _check(options)
    parts = options.parts
    if options.device != "cpu":
        placed(options.device)
        parts = tuple(part for part in parts if part in ON_DEVICE)
    seconds = _crossing(options) if CROSSING in parts else {}
    measured = {model: _of_model(model, options) for model in options.models if WHOLE in parts}
    pipelines = {
        f"{model}, M = {count}": _beside_pipelines(model, count, options)
        for model in options.models
        if PIPELINES in parts and model in AS_PIPELINES
        for count in options.microbatches
    }
    tensors = {m: _beside_tensors(m, options) for m in options.models if TENSORS in parts and m in AS_TENSORS}
    memory = _held(options) if MEMORY in parts and (options.quick or ALEXNET in options.models) else {}
    if not (seconds or measured or memory or pipelines or tensors):
        raise UsageError(
            f"--parts {' '.join(parts)} --models {' '.join(options.models)}: together measure nothing; leave one off"
        )
    figures, beside_torch = [], {**pipelines, **tensors}
    if options.device == "cpu":
        figures = [*_of_crossing(seconds), *_of_wholes(measured)]
    for name, one in beside_torch.items():
        figures.append(figure(f"{name}: {one['best']}, relative to {one['torch']}", one["of_torch"], one["promised"]))
    for how, one in {} if options.quick else memory.items():
        what = f"alexnet, {how}: parameters, gradients and state of the largest partition, relative to the whole model"
        figures.append(figure(what, one["of_whole"], one["promised"], lower=True))
    tables = []
    if seconds:
        micros = number(1e6 * statistics.median(seconds["crossing"]))
        tables = [Table("what crosses between two partitions", ("", "us"), [[f"{CROSSES:,} bytes", micros]])]
    tables += [_table(model, one) for model, one in measured.items()]
    tables += [_table_of_held(how, one) for how, one in memory.items()]
    for name, one in beside_torch.items():
        tables.append(Table(f"{name}, beside torch", ("", "samples/s", "+-"), rate_rows(one)))
    fields = {"crossing_seconds": seconds, "models": measured, "memory": memory}
    return Measured({"repeats": options.repeats, **fields, "pipelines": pipelines, "tensors": tensors}, figures, tables)


def _check(options: SplitBenchOptions) -> None:
    check_names("model", options.models, MODELS)
    check_names("part", options.parts, PARTS)
    for count in options.microbatches:
        if not 1 <= count <= MODELS["alexnet"].batch_size:
            raise UsageError(f"--microbatches {count}: must be from 1 to {MODELS['alexnet'].batch_size}")


def _crossing(options: SplitBenchOptions) -> dict[str, list[float]]:
    steps = 20 if options.quick else CROSSINGS
    once = partial(partitions.crossing_seconds, CROSSES, steps, options.device)
    return interleave(
        {"crossing": once, "copies": partial(partitions.copying_seconds, CROSSES, steps)}, options.repeats
    )


def _of_crossing(seconds: Mapping[str, list[float]]) -> list[Figure]:
    what = f"{CROSSES:,} bytes cross: time relative to copying them in and out"
    return [figure(what, ratio(seconds["crossing"], seconds["copies"]), COPIES, lower=True)] if seconds else []


def _of_wholes(measured: Json) -> list[Figure]:
    figures = []
    for model, one in measured.items():
        if MODELS[model].promised:
            figures.append(figure(f"{model}: of the {ONE}", one["of_one"][SPLIT], MODELS[model].promised))
        if MODELS[model].ahead:
            figures.append(figure(f"{model}: of the {TWO}", one["of_two"][SPLIT], 1.0))
    return figures


def _workload(name: str, options: SplitBenchOptions) -> loops.Workload:
    model = MODELS[name]
    task, steps = (f"{WORKLOADS}mlp_quick", 5) if options.quick else (model.task, model.steps)
    return loops.Workload(task, steps, model.batch_size, RATE, options.device)


def _of_model(name: str, options: SplitBenchOptions) -> Json:
    model, workload = MODELS[name], _workload(name, options)
    contenders: dict[str, Callable[[], float]] = {
        ONE: partial(loops.independent, workload, 1),
        TWO: partial(loops.independent, workload, 1, 2),
        SPLIT: partial(partitions.split, workload, model.how),
    }
    if options.device != "cpu":  # a device computes equally fast with any number of threads
        del contenders[TWO]
    taken = interleave(contenders, options.repeats)
    return {
        "task": workload.task,
        "split": model.split,
        "batch_size": model.batch_size,
        **rates(taken),
        "of_one": {name: ratio(values, taken[ONE]) for name, values in taken.items()},
        "of_two": {name: ratio(values, taken[TWO]) for name, values in taken.items() if TWO in taken},
    }


def _held(options: SplitBenchOptions) -> Json:
    """Measure the memory of partitions, and of their processes at the peak, relative to the whole model's."""
    task, splits = (MODELS[ALEXNET].task, HELD) if not options.quick else (f"{WORKLOADS}mlp_quick", {MLP: 1.0})
    workload = loops.Workload(task, HELD_STEPS, MODELS[ALEXNET].batch_size, RATE)
    [whole] = partitions.held(workload, partitions.How("", 1))
    found = {}
    for how, promised in splits.items():
        parts = partitions.held(workload, how)
        shares = {"of_whole": max(part.held for part in parts) / whole.held, "promised": promised}
        sizes = {"partitions": [*map(list, parts)], "whole": list(whole)}
        found[f"{how.split} over {how.partitions}"] = {**shares, **sizes}
    return found


def _table(model: str, one: Json) -> Table:
    title, columns = f"{model}: {one['split']}, {one['batch_size']} samples a step", ("", "samples/s", "+-")
    return Table(title, (*columns, "of 1 thread", "of 2"), rate_rows(one, one["of_one"], one["of_two"]))


def _table_of_held(how: str, one: Json) -> Table:
    rows = [
        ["whole", *one["whole"]],
        *([f"partition {partition}", *part] for partition, part in enumerate(one["partitions"])),
    ]
    title = f"{how}: MB of parameters, gradients and state, and most that the process had in memory"
    sizes = [[name, *(f"{size / 1e6:,.0f}" for size in sizes)] for name, *sizes in rows]
    return Table(title, ("", "held", "at its peak"), sizes)


# beside torch


def _beside_pipelines(name: str, microbatches: int, options: SplitBenchOptions) -> Json:
    """Measure our stages, and torch's with each possible schedule."""
    workload = _workload(name, options)
    ours = {"stages": partial(partitions.split, workload, partitions.How("stages", microbatches=microbatches))}
    can = (torch_split.GPIPE, torch_split.ONE_F_ONE_B)[: 1 if microbatches < partitions.PARTITIONS else None]
    theirs = {f"torch, {schedule}": partial(torch_split.pipeline, workload, schedule, microbatches) for schedule in can}
    return _beside_torch(ours, theirs, AS_PIPELINES[name], options)


def _beside_tensors(name: str, options: SplitBenchOptions) -> Json:
    workload = _workload(name, options)
    ours = {"neurons": partial(partitions.split, workload, partitions.How("neurons"))}
    return _beside_torch(ours, {"torch, tensors": partial(torch_split.tensors, workload)}, AS_TENSORS[name], options)


Contenders = Mapping[str, Callable[[], float]]


def _beside_torch(ours: Contenders, theirs: Contenders, promised: float, options: SplitBenchOptions) -> Json:
    """Measure all in turns, and compare our fastest with torch's fastest."""
    taken = interleave({**ours, **theirs}, options.repeats)
    found = rates(taken)
    best, rival = (max(names, key=found["samples_per_second"].__getitem__) for names in (ours, theirs))
    shares = {"of_torch": ratio(taken[best], taken[rival]), "promised": promised}
    return {**found, "best": best, "torch": rival, **shares}
