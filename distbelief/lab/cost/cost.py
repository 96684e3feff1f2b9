"""Cost of training a task: layers, an iteration, memory, epochs, the largest batch; comparison of several machines."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from distbelief.core.optimizer import LEARNING_RATES, Optimizer, optim
from distbelief.core.records import Json
from distbelief.errors import TrainingError, UsageError
from distbelief.lab.cost import profile as profiling
from distbelief.lab.cost.options import MOST_BATCH, CostRequest, check_amounts
from distbelief.lab.cost.profile import Profile, StepTime, UpdateCost, busy_notes, ladder
from distbelief.lab.cost.trace import COUNTED, REST, Layer, MemoryTrace, Tracer
from distbelief.record.folder import versions
from distbelief.record.limits import free_memory, machine
from distbelief.tasks import Data, Task
from distbelief.tasks.worker import load, with_data

PROCESS = "process"
"""Kind of memory that Python, torch and the data hold before a model exists."""
MARGIN, SPARE = 1.15, 4e6
"""Factor, and bytes, by which a process's memory may exceed the traced memory. The benchmark has seen 1.13 times
(convolutions need work space) and 2.4 MB."""


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of training with minibatches of one size, in seconds and bytes."""

    task: str
    request: CostRequest
    optimizer: str
    layers: list[Layer]
    trace: MemoryTrace
    profile: Profile
    point: StepTime
    last: StepTime
    """Step with the last minibatch of an epoch."""
    updates: list[UpdateCost]
    """Cost of each optimizer's update, the requested one first."""
    process: int
    samples: int
    max_memory: float | None = None
    largest_batch: int | None = None
    """Largest batch that fits `max_memory` with the margin; None without that limit."""
    notes: list[str] = []

    @property
    def step(self) -> float:
        """Return the seconds of an iteration: a gradient and an update."""
        return self.point.step + self.updates[0].seconds

    @property
    def epoch_seconds(self) -> float:
        """Return the seconds of an epoch in one process; its last minibatch may be smaller."""
        others = math.ceil(self.samples / self.request.batch_size) - 1
        return others * self.step + self.last.step + self.updates[0].seconds

    @property
    def memory(self) -> dict[str, int]:
        """Return bytes by kind at the peak, with those of the process itself."""
        return {**self.trace.memory, PROCESS: self.process}

    def charges(self, epochs: int) -> dict[str, float]:
        """Return `seconds` of some epochs, `kilowatt_hours` and `price` if known, each also per million samples.

        Charges per million samples compare models, batch sizes and machines.
        """
        seconds = epochs * self.epoch_seconds
        charges = {"seconds": seconds}
        if self.request.watts is not None:
            charges["kilowatt_hours"] = self.request.watts * seconds / 3.6e6
        if self.request.price_per_hour is not None:
            charges["price"] = self.request.price_per_hour * seconds / 3600
        millions = epochs * self.samples / 1e6
        return {**charges, **{f"{name}{PER_MILLION}": value / millions for name, value in charges.items()}}

    def as_json(self) -> Json:
        """Return the fields of `--json`."""
        fields: Json = msgspec.to_builtins(self, str_keys=True)
        return {
            **fields.pop("request"),
            **fields,
            "version": versions()["distbelief"],
            "processor": processor(self.request.device),
            "step": self.step,
            "memory": self.memory,
            "peak": sum(self.memory.values()),
            "epoch": self.charges(1),
            "all_epochs": self.charges(self.request.epochs),
        }


def measure(
    task: Task,
    request: CostRequest,
    optimizer: Optimizer,
    max_memory: float | None = None,
    seconds: float = 30.0,
    tell: Callable[[str], None] = lambda _: None,
) -> TrainingCost:
    """Measure the cost of training a task here, and with a limit of memory the largest batch that fits."""
    amounts = {"watts": request.watts, "price-per-hour": request.price_per_hour}
    check_amounts(request.batch_size, request.epochs, amounts | {"max-memory": max_memory, "seconds": seconds})
    tell("loading the data")
    data = load(task, "training")
    process, tracer = held(), Tracer(task, sample_of(data))
    tell("following an iteration on fake tensors")
    trace = tracer.follow(request.batch_size, optimizer)
    largest = _largest(tracer, optimizer, max_memory, process) if max_memory else None
    sizes = {size: does_not_fit(tracer, size, optimizer) for size in ladder(request.batch_size)}
    names = [layer.name for layer in tracer.layers]
    profile = profiling.measure(with_data(task, data), names, sizes, seconds, request.device, tell)
    elements = sum(layer.parameters for layer in tracer.layers)
    tell("updates with each optimizer")
    others = [optim(name) for name in LEARNING_RATES if name != optimizer.name]
    return TrainingCost(
        task=task.reference,
        request=request,
        optimizer=optimizer.name,
        layers=tracer.layers,
        trace=trace,
        profile=profile,
        point=profile.at(request.batch_size, tracer.mapped),
        last=profile.at(len(data) % request.batch_size or request.batch_size, tracer.mapped),
        updates=[profiling.measure_update(choice, elements, request.device) for choice in (optimizer, *others)],
        process=process,
        samples=len(data),
        max_memory=max_memory,
        largest_batch=largest,
        notes=[*_notes(tracer, profile, request.batch_size), *beyond(max_memory)],
    )


def processor(device: str) -> str:
    """Return the name of the processor or GPU."""
    return str(machine()["processor"]) if device == "cpu" else torch.cuda.get_device_name(device)


def _notes(tracer: Tracer, profile: Profile, batch_size: int) -> list[str]:
    notes = [tracer.note] if tracer.note else []
    if kinds := dict.fromkeys(layer.kind or REST for layer in tracer.layers if layer.uncounted):
        notes.append(
            f"multiply-adds of {', '.join(kinds)} are unknown: torch counts only convolutions, matrix products and "
            "attention"
        )
    notes += busy_notes(profile.busy)
    notes += [f"a batch of {size} was not profiled: {reason}" for size, reason in profile.left_out.items()]
    if batch_size in profile.left_out:
        notes.append(
            f"times are extrapolated from {profile.points[-1].batch_size} samples to {batch_size}, with the "
            "same shares of layers"
        )
    return notes


def sample_of(data: Data) -> tuple[object, object]:
    """Return inputs and targets of the few samples that a trace needs."""
    return data.batch(torch.arange(COUNTED) % len(data))


def held(kind: str = "VmRSS") -> int:
    """Return the bytes that this process holds, or held at its peak (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) << 10


def needed(tracer: Tracer, batch_size: int, optimizer: Optimizer) -> int:
    """Return the bytes that iterations need beyond those of the process itself."""
    return math.ceil(MARGIN * tracer.follow(batch_size, optimizer).peak + SPARE)


def beyond(limit: float | None) -> list[str]:
    """Return a note if a limit exceeds the free memory of this machine or container."""
    left = free_memory()
    return [f"--max-memory {limit / 1e9:.3g}GB: {left / 1e9:.2f} GB are free here"] if limit and limit > left else []


def does_not_fit(tracer: Tracer, batch_size: int, optimizer: Optimizer) -> str:
    """Return why a batch cannot be computed or exceeds the free memory; "" if it fits."""
    try:
        left, needs = free_memory(), needed(tracer, batch_size, optimizer)
    except TrainingError as error:
        return str(error)
    if needs <= left:
        return ""
    return f"it needs {needs / 1e9:.1f} GB, and {left / 1e9:.1f} GB are free here"


def _largest(tracer: Tracer, optimizer: Optimizer, limit: float, process: int) -> int:

    def fits(size: int) -> bool:
        return process + needed(tracer, size, optimizer) <= limit

    try:
        first = 1
        tracer.follow(first, optimizer)
    except TrainingError:  # a batch norm refuses a single sample
        first = COUNTED
    if not fits(first):
        few = "one sample fits" if first == 1 else f"{first} samples fit"
        least = process + needed(tracer, first, optimizer)
        raise UsageError(
            f"--max-memory {limit / 1e9:.3g}GB: not {few}; the least is {math.ceil(least / 1e7) / 100:g}GB "
            f"({process / 1e9:.2f} of it are the process without a model)"
        )
    low, high = first, 2 * first
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    sizes = range(min(high, MOST_BATCH + 1))
    return bisect.bisect_left(sizes, True, lo=low, key=lambda size: not fits(size)) - 1


UNITS = {"seconds": "s", "kilowatt_hours": "kWh", "price": "price"}
PER_MILLION = "_per_million_samples"


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a cost file that a comparison reads."""

    task: str
    optimizer: str
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    processor: str
    version: str
    epoch: dict[str, Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]]

    @property
    def charges(self) -> dict[str, float]:
        """Return the charges for a million samples."""
        return {name: self.epoch[name + PER_MILLION] for name in UNITS if name + PER_MILLION in self.epoch}


def compare(paths: Sequence[str]) -> tuple[str, list[Json]]:
    """Return the task, and a row for each file: charges for a million samples, and their ratios to the first file's."""
    if len(paths) < 2:
        raise UsageError("--compare: name two files of `distbelief cost TASK --json`, or more")
    first, *others = files = [_read(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        for what in ("task", "version"):
            if (theirs := getattr(other, what)) != (ours := getattr(first, what)):
                raise UsageError(
                    f"--compare {path}: its {what} is {theirs}, but that of {paths[0]} is {ours}; measure both alike"
                )
    shared = [name for name in first.charges if all(name in other.charges for other in others)]
    rows: list[Json] = []
    for path, file in zip(paths, files, strict=True):
        row = {name: getattr(file, name) for name in ("processor", "optimizer", "batch_size")}
        for name in shared:
            row |= {name: file.charges[name], f"{name}_of_first": file.charges[name] / first.charges[name]}
        rows.append({"file": path, **row})
    return first.task, rows


def _read(path: str) -> CostFile:
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
            raise OSError("it is no regular file")
        file = msgspec.json.decode(Path(path).read_bytes(), type=CostFile)
        if "seconds" not in file.charges:
            raise msgspec.ValidationError("it has no seconds")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--compare {path}: is no file of `distbelief cost TASK --json`: {error}") from None
    return file
