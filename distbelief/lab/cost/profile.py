"""What a minibatch takes, measured: whole steps at several batch sizes, which take turns, and the layers of one size.

A step is what a replica computes (`tasks.worker.Trainer`). Its time is that of the thread on a processor, which other
processes do not lengthen as they do the wall's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distbelief.core.effects import Batch
from distbelief.core.settings import Settings
from distbelief.errors import TrainingError
from distbelief.lab.cost import trace
from distbelief.lab.cost.trace import MAPPED, REST, WHOLE
from distbelief.places.evaluate import threads
from distbelief.tasks.task import Data, Task
from distbelief.tasks.worker import Trainer, build_model, load, with_data

INPUT, FORWARD, BACKWARD = "input", "forward", "backward"
PHASES = (INPUT, FORWARD, BACKWARD)
"""Of a step, in their order: gathering a minibatch, the model and its loss, their gradients."""
PHASE_OF = {trace.INPUT: INPUT, trace.MAPS: FORWARD, trace.GRADIENTS: BACKWARD, trace.MAP_GRADIENTS: BACKWARD}
"""In which phase a memory of a kind is made."""
SMALLEST, SPACING = (1, 2, 4), 4
"""The batch sizes that are profiled first, since what a sample costs changes most there; and how many times larger each
is from there on.
"""
BUSY = 1.05
"""The wall's time, as a multiple of the thread's, from which the machine is busy with something else."""
BURST = 0.02
"""Least seconds for which steps of one size follow each other."""
LEAST_ROUNDS, ENOUGH = 3, 3.0
"""Least rounds of all sizes; seconds after which `MOST_ROUNDS` suffice."""
STEPS_EACH, STEPS_LARGEST = 1 + LEAST_ROUNDS, 1 + 2 * LEAST_ROUNDS
"""Steps of a size that are to fit the time, with a first one; and of the largest, whose layers are looked at too."""
MOST_ROUNDS = 30

Part = tuple[str, str]
"""The phase of a step, and a layer."""


class StepTime(msgspec.Struct, frozen=True):
    """A step with minibatches of one size, in seconds."""

    batch_size: int
    input: float
    forward: float
    backward: float
    steps: int
    """How many were measured."""

    @property
    def step(self) -> float:
        """All of it, without an update."""
        return self.input + self.forward + self.backward


class Profile(msgspec.Struct, frozen=True):
    """What steps of a task take."""

    points: list[StepTime]
    """By batch size."""
    layers: dict[str, tuple[float, float]]
    """Seconds forward and backward of each layer, at the batch size that was asked for."""
    busy: float
    """The wall's time as a multiple of the thread's; 1 on a device, which has a clock of its own."""
    left_out: dict[int, str] = {}
    """Batch sizes that were not profiled, and why."""
    fresh: float = 0.0
    """Seconds that a byte takes which the kernel clears for a step, and is given back."""

    def at(self, batch_size: int, mapped: Callable[[int], Mapping[str, int]] = lambda _: {}) -> StepTime:
        """A step at any batch size: on the line between the profiled sizes beside it, or on the last line beyond them.
        What the kernel takes for memory is no part of the line, since it begins where a tensor is large enough.

        Args:
            batch_size: samples in the minibatch.
            mapped: bytes by kind that a step of a size has of the kernel (`Tracer.mapped`).

        >>> profile = Profile([StepTime(1, 0.0, 1.0, 1.0, 9), StepTime(4, 0.0, 4.0, 4.0, 9)], {}, 1.0)
        >>> profile.at(2).step, profile.at(16).step
        (4.0, 32.0)
        """
        points = self.points
        above = next((i for i, point in enumerate(points) if point.batch_size >= batch_size), len(points) - 1)
        low, high = points[max(1, above) - 1 : max(1, above) + 1] if points[1:] else (_NOTHING, points[0])
        part = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
        made = dict.fromkeys(PHASES, 0.0)
        for point, share in ((low, 1 - part), (high, part)):
            kernel = self._kernel(mapped(point.batch_size) if point.batch_size else {})
            for name in PHASES:
                made[name] += share * (getattr(point, name) - kernel[name])
        more = self._kernel(mapped(batch_size))
        return StepTime(batch_size, **{name: max(0.0, made[name] + more[name]) for name in PHASES}, steps=0)

    def _kernel(self, mapped: Mapping[str, int]) -> dict[str, float]:
        """Seconds of each phase that go into the kernel's memory."""
        found = dict.fromkeys(PHASES, 0.0)
        for kind, size in mapped.items():
            found[PHASE_OF[kind]] += self.fresh * size
        return found


_NOTHING = StepTime(0, 0.0, 0.0, 0.0, 0)


def ladder(largest: int) -> list[int]:
    """The batch sizes that are profiled, up to the one that is asked for.

    >>> ladder(3), ladder(64), ladder(100)
    ([1, 2, 3], [1, 2, 4, 16, 64], [1, 2, 4, 16, 64, 100])
    """
    sizes = [size for size in SMALLEST if size <= largest]
    while sizes[-1] * SPACING <= largest:
        sizes.append(sizes[-1] * SPACING)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def measure(
    task: Task,
    names: Sequence[str],
    batch_sizes: Mapping[int, str],
    seconds: float,
    device: str = "cpu",
    told: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Profile a task.

    Args:
        task: whose steps are measured; a minibatch that is larger than its training set repeats it.
        names: of its layers, as a trace has them.
        batch_sizes: ascending, each with why it is not to be tried, "" where it is; of the last that can be measured,
            the layers are too.
        seconds: for all of it; sizes of which too few steps would fit are left out, but never the first.
        device: where it computes.
        told: is told what is measured.

    Raises:
        TrainingError: the model or the loss raised with every batch size.
    """
    begin = time.perf_counter()
    with threads(1):
        data, model = load(task, "training"), build_model(task, 0, device)
        clock = clock_of(device)

        def steps_of(size: int, names: Sequence[str] = ()) -> _Steps:
            return _Steps(task, data, model, size, clock, names)

        steps, left_out = _fitting(steps_of, batch_sizes, seconds, told)
        layered = steps_of(max(steps), names)
        contenders, rounds, least = [*steps.values(), layered], 0, 0.0
        while rounds < MOST_ROUNDS or time.perf_counter() < begin + ENOUGH:
            now = time.perf_counter()
            if rounds and now + least > begin + seconds and (rounds >= LEAST_ROUNDS or now > begin + seconds):
                break
            for one in contenders[:: -1 if rounds % 2 else 1]:
                one.burst()
            rounds, least = rounds + 1, time.perf_counter() - now
            told(f"round {rounds} of steps with {', '.join(map(str, steps))} samples")
    points = [one.point() for one in steps.values()]
    busy = statistics.median(ratio for one in contenders for ratio in one.busy)
    return Profile(points, layered.layers(points[-1]), max(1.0, busy), left_out, 0.0 if device != "cpu" else fresh())


def fresh() -> float:
    """Seconds of this thread for each byte of a memory that the kernel clears, until it has it back: what filling it at
    first takes more than filling it again.
    """
    clock, taken = StepClock(), []
    for _ in range(LEAST_ROUNDS):
        moments = [clock.mark()]
        memory = torch.empty(2 * MAPPED, dtype=torch.uint8)
        for _ in range(2):
            memory.fill_(1)
            moments.append(clock.mark())
        del memory
        first, again, back = clock.between([*moments, clock.mark()])
        taken.append(first - again + back)
    return max(0.0, statistics.median(taken) / (2 * MAPPED))


def _fitting(
    steps_of: Callable[[int], _Steps], batch_sizes: Mapping[int, str], seconds: float, told: Callable[[str], None]
) -> tuple[dict[int, _Steps], dict[int, str]]:
    """The sizes of which several steps fit the time, warm, and why the others are left out."""
    steps: dict[int, _Steps] = {}
    left_out: dict[int, str] = {}
    failed: TrainingError | None = None
    taken: dict[int, float] = {}
    for size, reason in batch_sizes.items():
        expected, left = _continued(taken, size), seconds - STEPS_EACH * sum(taken.values())
        if taken and not reason and STEPS_LARGEST * expected > left:
            reason = f"its steps take about {expected:.2g} s, and {STEPS_LARGEST} do not fit {seconds:g} s"
        if not reason:
            told(f"a step with {size} samples")
            one = steps_of(size)
            try:
                if (last := one.step()) < BURST:
                    last = one.step()
                one.forget()
                steps[size], taken[size] = one, last
            except TrainingError as error:
                failed, reason = error, " ".join(str(error).split())
        if reason:
            left_out[size] = reason
    if not steps:
        raise failed or TrainingError(
            f"no batch size can be profiled: {'; '.join(f'{size}: {reason}' for size, reason in left_out.items())}"
        )
    return steps, left_out


def _continued(taken: Mapping[int, float], size: int) -> float:
    """Seconds of a step that is larger than those measured, on the line through the last two.

    >>> _continued({1: 2.0, 4: 3.0}, 16), _continued({1: 2.0}, 4), _continued({}, 1)
    (7.0, 8.0, 0.0)
    """
    if len(taken) < 2:
        return sum(taken.values()) * size / max(taken, default=1)
    (low, before), (high, last) = [*taken.items()][-2:]
    return last + max(0.0, last - before) * (size - high) / (high - low)


class _Steps:
    """Steps with minibatches of one size, and the moments at which their parts begin."""

    def __init__(
        self, task: Task, data: Data, model: nn.Module, size: int, clock: StepClock, names: Sequence[str]
    ) -> None:
        self._size, self._clock, self._model, self._names = size, clock, model, names
        self._marks: list[tuple[Part, Any]] = []
        self._taken: list[dict[Part, float]] = []
        self._number = 0
        self.busy: list[float] = []
        """The wall's seconds of each step, as a multiple of its own."""

        def loss(output: object, target: object) -> Tensor:
            made = task.loss(output, target)
            self._mark(BACKWARD, REST)
            return made

        repeated = _Repeated(data, size, lambda: self._mark(FORWARD, REST))
        marked = with_data(dataclasses.replace(task, loss=loss), repeated)
        self._trainer = Trainer(marked, model, Settings(batch_size=size, drop_last=True))

    def _mark(self, phase: str, layer: str) -> None:
        self._marks.append(((phase, layer), self._clock.mark()))

    def step(self) -> float:
        """Compute one; returns its seconds."""
        self._marks.clear()
        begin = time.perf_counter()
        self._mark(INPUT, REST)
        self._trainer.compute(Batch(0, self._number % self._trainer.order.batches))
        self._mark("", "")
        wall = time.perf_counter() - begin
        self._number += 1
        taken: dict[Part, float] = {}
        seconds = self._clock.between([moment for _, moment in self._marks])
        for (part, _), one in zip(self._marks, seconds, strict=False):
            taken[part] = taken.get(part, 0.0) + one
        self._taken.append(taken)
        total = sum(seconds)
        self.busy.append(wall / total if self._clock.of_thread and total else 1.0)
        return total

    def forget(self) -> None:
        """What was measured was to warm up the caches."""
        self._taken.clear()
        self.busy.clear()

    def burst(self) -> None:
        """Compute a few, one after the other."""
        with _hooked(self._model, self._names, self._mark):
            end = time.perf_counter() + BURST
            if self.step() < BURST:
                # the first has found the caches full of another size's data
                self._taken.pop()
                self.busy.pop()
                self.step()
            while time.perf_counter() < end:
                self.step()

    def _median(self, phase: str, layer: str | None = None) -> float:
        """Seconds of a part of a step."""
        return statistics.median(
            sum(s for (p, name), s in one.items() if p == phase and layer in (None, name)) for one in self._taken
        )

    def point(self) -> StepTime:
        """What a step takes: the lower quartile of all, of which each part has its usual share."""
        totals = sorted(sum(one.values()) for one in self._taken)
        parts = {phase: self._median(phase) for phase in PHASES}
        scale = totals[len(totals) // 4] / max(1e-12, sum(parts.values()))
        return StepTime(self._size, **{phase: scale * one for phase, one in parts.items()}, steps=len(totals))

    def layers(self, point: StepTime) -> dict[str, tuple[float, float]]:
        """Seconds forward and backward of each layer, in a step that takes so long when nobody looks at its layers."""
        both = []
        for phase, whole in ((FORWARD, point.forward), (BACKWARD, point.backward)):
            parts = {name: self._median(phase, name) for name in self._names}
            scale = whole / max(1e-12, sum(parts.values()))
            both.append({name: scale * one for name, one in parts.items()})
        return {name: (both[0][name], both[1][name]) for name in self._names}


class _Repeated:
    """A data set as often as whole minibatches of one size need it; after each, somebody is told."""

    def __init__(self, data: Data, size: int, gathered: Callable[[], None]) -> None:
        self._data, self._gathered = data, gathered
        self._samples = max(1, len(data) // size) * size

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Tensor) -> tuple[object, object]:
        """Those samples, of as many as there are."""
        made = self._data.batch(indices % len(self._data))
        self._gathered()
        return made


@contextlib.contextmanager
def _hooked(model: nn.Module, names: Sequence[str], mark: Callable[[str, str], None]) -> Iterator[None]:
    """Mark when each layer begins forward and ends, and when the gradient of what it makes is there."""

    def after(output: object, name: str) -> None:
        mark(FORWARD, REST)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: mark(BACKWARD, name))

    hooks = []
    for name in names:
        if name != REST:
            module = model.get_submodule(name if name != WHOLE else "")
            hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: mark(FORWARD, name)))
            hooks.append(module.register_forward_hook(lambda _, __, output, name=name: after(output, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def busy_notes(busy: float) -> list[str]:
    """Say how much longer steps took than the processor worked for them, where that is much."""
    long = f"the machine is busy: a step took {busy:.2f} times as long as the processor worked for it"
    return [f"{long}; times are the processor's"] if busy > BUSY else []


class StepClock:
    """The time that the thread has had a processor."""

    of_thread = True
    """Whether it stands still while the thread waits for a processor."""

    def mark(self) -> Any:
        """The moment that it is."""
        return time.thread_time_ns()

    def between(self, moments: Sequence[Any]) -> list[float]:
        """Seconds from each moment to the next."""
        return [(after - before) / 1e9 for before, after in itertools.pairwise(moments)]


class _DeviceClock(StepClock):
    """The time of a CUDA device, by events in its stream, be that the current device or not."""

    of_thread = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        moments[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(moments)]


def clock_of(device: str) -> StepClock:
    """What times work on a device: its own events, or the thread's time on a processor."""
    place = torch.device(device)
    return _DeviceClock(place) if place.type == "cuda" else StepClock()
