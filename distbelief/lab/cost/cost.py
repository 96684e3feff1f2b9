"""What it costs to train a task: each layer, an iteration, its memory, and epochs; the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from distbelief.core.optimizer import LEARNING_RATES, Optimizer, optim
from distbelief.core.records import Json
from distbelief.errors import TrainingError, UsageError
from distbelief.lab.cost import profile as profiling
from distbelief.lab.cost import updates
from distbelief.lab.cost.comparing import PER_MILLION
from distbelief.lab.cost.options import CostRequest
from distbelief.lab.cost.profile import Profile, StepTime, busy_notes, ladder
from distbelief.lab.cost.trace import COUNTED, REST, Layer, MemoryTrace, Tracer
from distbelief.lab.cost.updates import UpdateCost
from distbelief.record.folder import versions
from distbelief.record.limits import free_memory, machine
from distbelief.tasks import Data, Task
from distbelief.tasks.worker import load, with_data

PROCESS = "process"
"""The kind of memory that Python, torch and the data hold before there is a model."""
MARGIN, SPARE = 1.15, 4e6
"""Memory of a process beside what a trace counts: so many times as much, and so many bytes more. The benchmark has seen
1.13 times (convolutions need room to work in) and 2.4 MB.
"""
MOST_BATCH = 1 << 20
"""The largest batch that is looked for."""


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """What training costs with minibatches of one size; seconds and bytes."""

    task: str
    asked: CostRequest
    optimizer: str
    layers: list[Layer]
    trace: MemoryTrace
    profile: Profile
    point: StepTime
    """Of the batch size that was asked for."""
    last: StepTime
    """Of the last minibatch of an epoch."""
    updates: list[UpdateCost]
    """Of every optimizer; the one that was asked for comes first."""
    process: int
    """Bytes of the process without a model."""
    samples: int
    """In an epoch."""
    max_memory: float | None = None
    largest_batch: int | None = None
    """That fits `max_memory`, with the margin; None where that was not asked."""
    notes: list[str] = []

    @property
    def step(self) -> float:
        """Seconds of an iteration: a gradient and an update."""
        return self.point.step + self.updates[0].seconds

    @property
    def epoch_seconds(self) -> float:
        """Seconds of an epoch in one process; the last minibatch costs what it has samples."""
        others = math.ceil(self.samples / self.asked.batch_size) - 1
        return others * self.step + self.last.step + self.updates[0].seconds

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind at the peak, with what the process holds by itself."""
        return {**self.trace.memory, PROCESS: self.process}

    def charges(self, epochs: int) -> dict[str, float]:
        """Seconds of so many epochs, and what they cost where it is known; also of a million samples, by which models,
        batches and machines compare.

        Returns:
            `seconds`, `kilowatt_hours`, `price`, and each `..._per_million_samples`.
        """
        seconds = epochs * self.epoch_seconds
        found = {"seconds": seconds}
        if self.asked.watts is not None:
            found["kilowatt_hours"] = self.asked.watts * seconds / 3.6e6
        if self.asked.price_per_hour is not None:
            found["price"] = self.asked.price_per_hour * seconds / 3600
        millions = epochs * self.samples / 1e6
        return {**found, **{f"{name}{PER_MILLION}": value / millions for name, value in found.items()}}

    def as_json(self) -> Json:
        """All that is shown."""
        fields: Json = msgspec.to_builtins(self, str_keys=True)
        return {
            **fields.pop("asked"),
            **fields,
            "version": versions()["distbelief"],
            "processor": processor(self.asked.device),
            "step": self.step,
            "memory": self.memory,
            "peak": sum(self.memory.values()),
            "epoch": self.charges(1),
            "all_epochs": self.charges(self.asked.epochs),
        }


def measure(
    task: Task,
    asked: CostRequest,
    optimizer: Optimizer,
    max_memory: float | None = None,
    seconds: float = 30.0,
    told: Callable[[str], None] = lambda _: None,
) -> TrainingCost:
    """Measure what training a task costs here.

    Args:
        task: what is trained.
        asked: how, and what is charged for it.
        optimizer: that steps.
        max_memory: bytes that a process may hold; the largest batch that fits is looked for.
        seconds: for the profile.
        told: is told what is measured.

    Raises:
        UsageError: a value that cannot be, or a limit under which no batch fits.
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    amounts = {"watts": asked.watts, "price-per-hour": asked.price_per_hour}
    check_amounts(asked.batch_size, asked.epochs, amounts | {"max-memory": max_memory, "seconds": seconds})
    told("loading the data")
    data = load(task, "training")
    process, tracer = held(), Tracer(task, sample_of(data))
    told("following an iteration on fake tensors")
    trace = tracer.follow(asked.batch_size, optimizer)
    largest = _largest(tracer, optimizer, max_memory, process) if max_memory else None
    sizes = {size: does_not_fit(tracer, size, optimizer) for size in ladder(asked.batch_size)}
    names = [layer.name for layer in tracer.layers]
    profile = profiling.measure(with_data(task, data), names, sizes, seconds, asked.device, told)
    elements = sum(layer.parameters for layer in tracer.layers)
    told("updates with each optimizer")
    others = [optim(name) for name in LEARNING_RATES if name != optimizer.name]
    return TrainingCost(
        task=task.reference,
        asked=asked,
        optimizer=optimizer.name,
        layers=tracer.layers,
        trace=trace,
        profile=profile,
        point=profile.at(asked.batch_size, tracer.mapped),
        last=profile.at(len(data) % asked.batch_size or asked.batch_size, tracer.mapped),
        updates=[updates.measure(one, elements, asked.device) for one in (optimizer, *others)],
        process=process,
        samples=len(data),
        max_memory=max_memory,
        largest_batch=largest,
        notes=[*_notes(tracer, profile, asked.batch_size), *beyond(max_memory)],
    )


def processor(device: str) -> str:
    """The name of what computed."""
    return str(machine()["processor"]) if device == "cpu" else torch.cuda.get_device_name(device)


def check_amounts(batch_size: int, epochs: int, amounts: Mapping[str, float | None]) -> None:
    """Refuse what cannot be, by its option.

    Raises:
        UsageError: naming the option, and the value.
    """
    for name, value in (("batch-size", batch_size), ("epochs", epochs)):
        if not 1 <= value <= MOST_BATCH:
            raise UsageError(f"--{name} {value}: must be from 1 to {MOST_BATCH}")
    for name, given in amounts.items():
        if given is not None and not 0 < given < math.inf:
            raise UsageError(f"--{name} {given:g}: must be more than 0, and finite")


def _notes(tracer: Tracer, profile: Profile, batch_size: int) -> list[str]:
    """What is to be known of a profile."""
    notes = [tracer.note] if tracer.note else []
    if kinds := dict.fromkeys(layer.kind or REST for layer in tracer.layers if layer.uncounted):
        notes.append(
            f"no multiply-adds are known of what {', '.join(kinds)} do with their parameters: torch counts "
            "convolutions, products of matrices and attention"
        )
    notes += busy_notes(profile.busy)
    notes += [f"a batch of {size} was not profiled: {reason}" for size, reason in profile.left_out.items()]
    if batch_size in profile.left_out:
        notes.append(
            f"times are continued from {profile.points[-1].batch_size} samples to {batch_size}, those of layers are "
            f"shares of a step with {profile.points[-1].batch_size}"
        )
    return notes


def sample_of(data: Data) -> tuple[object, object]:
    """Inputs and targets of the few samples that a trace needs."""
    return data.batch(torch.arange(COUNTED) % len(data))


def held(kind: str = "VmRSS") -> int:
    """Bytes that this process holds, or has held at most (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) << 10


def needed(tracer: Tracer, batch_size: int, optimizer: Optimizer) -> int:
    """Bytes that a process needs for iterations, beside what it holds by itself."""
    return math.ceil(MARGIN * tracer.follow(batch_size, optimizer).peak + SPARE)


def beyond(limit: float | None) -> list[str]:
    """What is to be known of a limit that is more than this machine, or its container, has left."""
    left = free_memory()
    return [f"--max-memory {limit / 1e9:.3g}GB: {left / 1e9:.2f} GB are left here"] if limit and limit > left else []


def does_not_fit(tracer: Tracer, batch_size: int, optimizer: Optimizer) -> str:
    """Why a batch cannot be computed, or would not fit what this machine has left; "" where it does."""
    try:
        left, asked = free_memory(), needed(tracer, batch_size, optimizer)
    except TrainingError as error:
        return str(error)
    if asked <= left:
        return ""
    return f"it needs {asked / 1e9:.1f} GB, and {left / 1e9:.1f} GB are left here"


def _largest(tracer: Tracer, optimizer: Optimizer, limit: float, process: int) -> int:
    """The largest batch that fits.

    Raises:
        UsageError: not one sample does.
    """

    def fits(size: int) -> bool:
        return process + needed(tracer, size, optimizer) <= limit

    try:
        first = 1
        tracer.follow(first, optimizer)
    except TrainingError:  # a batch norm refuses one
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
    high = min(high, MOST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
