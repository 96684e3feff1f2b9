"""Profiles of training steps: whole steps at several alternating batch sizes, the layers at one size, and updates.

A step is a replica's computation (`tasks.worker.Trainer`). Its time is the thread's CPU time, which other processes do
not lengthen.
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
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Settings
from distbelief.errors import TrainingError
from distbelief.lab.cost import trace
from distbelief.lab.cost.trace import MAPPED, REST, WHOLE
from distbelief.places.evaluate import threads
from distbelief.server.optimizers import build, stepper
from distbelief.tasks.task import Data, Task
from distbelief.tasks.worker import Trainer, build_model, load, with_data

INPUT, FORWARD, BACKWARD = "input", "forward", "backward"
PHASES = (INPUT, FORWARD, BACKWARD)
"""Phases of a step in order: gathering a minibatch, the model and its loss, their gradients."""
PHASE_OF = {trace.INPUT: INPUT, trace.MAPS: FORWARD, trace.GRADIENTS: BACKWARD, trace.MAP_GRADIENTS: BACKWARD}
"""Phase that allocates each kind of memory."""
SMALLEST, SPACING = (1, 2, 4), 4
"""Smallest batch sizes to profile, where the time per sample changes most, and the ratio between larger ones."""
BUSY = 1.05
"""Ratio of wall time to thread time above which the machine counts as busy."""
BURST = 0.02
"""Least seconds to stay at one size."""
LEAST_ROUNDS, ENOUGH = 3, 3.0
"""Least rounds over all sizes, and the seconds that rounds should fill, up to `MOST_ROUNDS`."""
STEPS_EACH, STEPS_LARGEST = 1 + LEAST_ROUNDS, 1 + 2 * LEAST_ROUNDS
"""Steps that must fit the time: of each size, including the first, and of the largest, whose layers are timed too."""
MOST_ROUNDS = 30

Part = tuple[str, str]


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step with minibatches of one size."""

    batch_size: int
    input: float
    forward: float
    backward: float
    steps: int

    @property
    def step(self) -> float:
        """Return the seconds of the whole step, without an update."""
        return self.input + self.forward + self.backward


class Profile(msgspec.Struct, frozen=True):
    """Times of a task's steps."""

    points: list[StepTime]
    layers: dict[str, tuple[float, float]]
    """Seconds forward and backward of each layer, at the requested batch size."""
    busy: float
    """Ratio of wall time to thread time; 1 on a device, which has its own clock."""
    left_out: dict[int, str] = {}
    """Batch sizes without a profile, and why."""
    fresh: float = 0.0
    """Seconds per byte for memory that the kernel clears and takes back in each step."""

    def at(self, batch_size: int, mapped: Callable[[int], Mapping[str, int]] = lambda _: {}) -> StepTime:
        """Return the step time of any batch size, on the line through the neighbouring profiled sizes, or the last two.

        `mapped` returns a step's bytes from the kernel by kind; their time is added to the line, as only large tensors
        need it.

        >>> profile = Profile([StepTime(1, 0.0, 1.0, 1.0, 9), StepTime(4, 0.0, 4.0, 4.0, 9)], {}, 1.0)
        >>> profile.at(2).step, profile.at(16).step
        (4.0, 32.0)
        """
        points = self.points
        above = next((i for i, point in enumerate(points) if point.batch_size >= batch_size), len(points) - 1)
        low, high = points[max(1, above) - 1 : max(1, above) + 1] if points[1:] else (_NOTHING, points[0])
        part = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
        seconds = dict.fromkeys(PHASES, 0.0)
        for point, share in ((low, 1 - part), (high, part)):
            kernel = self._kernel(mapped(point.batch_size) if point.batch_size else {})
            for name in PHASES:
                seconds[name] += share * (getattr(point, name) - kernel[name])
        more = self._kernel(mapped(batch_size))
        return StepTime(batch_size, **{name: max(0.0, seconds[name] + more[name]) for name in PHASES}, steps=0)

    def _kernel(self, mapped: Mapping[str, int]) -> dict[str, float]:
        """Return the seconds of each phase for memory from the kernel."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for kind, size in mapped.items():
            seconds[PHASE_OF[kind]] += self.fresh * size
        return seconds


_NOTHING = StepTime(0, 0.0, 0.0, 0.0, 0)


def ladder(largest: int) -> list[int]:
    """Return the batch sizes to profile, up to the requested one.

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
    tell: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Profile a task's steps at these batch sizes, and the named layers at the last one that can be measured.

    A size that comes with a reason is left out. So is one too slow for enough steps in these seconds, except the first.
    A minibatch larger than the training set repeats it.
    """
    begin = time.perf_counter()
    with threads(1):
        data, model = load(task, "training"), build_model(task, 0, device)
        clock = clock_of(device)

        def steps_of(size: int, names: Sequence[str] = ()) -> _Steps:
            return _Steps(task, data, model, size, clock, names)

        steps, left_out = _fitting(steps_of, batch_sizes, seconds, tell)
        layered = steps_of(max(steps), names)
        contenders, rounds, least = [*steps.values(), layered], 0, 0.0
        while rounds < MOST_ROUNDS or time.perf_counter() < begin + ENOUGH:
            now = time.perf_counter()
            if rounds and now + least > begin + seconds and (rounds >= LEAST_ROUNDS or now > begin + seconds):
                break
            for contender in contenders[:: -1 if rounds % 2 else 1]:
                contender.burst()
            rounds, least = rounds + 1, time.perf_counter() - now
            tell(f"round {rounds} of steps with {', '.join(map(str, steps))} samples")
    points = [contender.point() for contender in steps.values()]
    busy = statistics.median(ratio for contender in contenders for ratio in contender.busy)
    return Profile(points, layered.layers(points[-1]), max(1.0, busy), left_out, 0.0 if device != "cpu" else fresh())


def fresh() -> float:
    """Return this thread's seconds per byte of memory that the kernel clears and takes back.

    It is the time of a first fill, minus that of a second fill, plus that of the release.
    """
    clock, seconds = StepClock(), []
    for _ in range(LEAST_ROUNDS):
        moments = [clock.mark()]
        memory = torch.empty(2 * MAPPED, dtype=torch.uint8)
        for _ in range(2):
            memory.fill_(1)
            moments.append(clock.mark())
        del memory
        first, again, back = clock.between([*moments, clock.mark()])
        seconds.append(first - again + back)
    return max(0.0, statistics.median(seconds) / (2 * MAPPED))


def _fitting(
    steps_of: Callable[[int], _Steps], batch_sizes: Mapping[int, str], seconds: float, tell: Callable[[str], None]
) -> tuple[dict[int, _Steps], dict[int, str]]:
    """Warm up each size; return those with several steps that fit the time, and why the others are left out."""
    steps: dict[int, _Steps] = {}
    left_out: dict[int, str] = {}
    failed: TrainingError | None = None
    seconds_of: dict[int, float] = {}
    for size, reason in batch_sizes.items():
        expected, left = _continued(seconds_of, size), seconds - STEPS_EACH * sum(seconds_of.values())
        if seconds_of and not reason and STEPS_LARGEST * expected > left:
            reason = f"its steps take about {expected:.2g} s, and {STEPS_LARGEST} do not fit {seconds:g} s"
        if not reason:
            tell(f"a step with {size} samples")
            candidate = steps_of(size)
            try:
                if (last := candidate.step()) < BURST:
                    last = candidate.step()
                candidate.forget()
                steps[size], seconds_of[size] = candidate, last
            except TrainingError as error:
                failed, reason = error, " ".join(str(error).split())
        if reason:
            left_out[size] = reason
    if not steps:
        raise failed or TrainingError(
            f"no batch size can be profiled: {'; '.join(f'{size}: {reason}' for size, reason in left_out.items())}"
        )
    return steps, left_out


def _continued(seconds: Mapping[int, float], size: int) -> float:
    """Return the seconds of a larger step, on the line through the last two measured.

    >>> _continued({1: 2.0, 4: 3.0}, 16), _continued({1: 2.0}, 4), _continued({}, 1)
    (7.0, 8.0, 0.0)
    """
    if len(seconds) < 2:
        return sum(seconds.values()) * size / max(seconds, default=1)
    (low, before), (high, last) = [*seconds.items()][-2:]
    return last + max(0.0, last - before) * (size - high) / (high - low)


class _Steps:
    """Steps with minibatches of one size, and the moments at which their parts begin."""

    def __init__(
        self, task: Task, data: Data, model: nn.Module, size: int, clock: StepClock, names: Sequence[str]
    ) -> None:
        self._size, self._clock, self._model, self._names = size, clock, model, names
        self._marks: list[tuple[Part, Any]] = []
        self._times: list[dict[Part, float]] = []
        self._number = 0
        self.busy: list[float] = []
        """Ratio of wall time to thread time of each step."""

        def loss(output: object, target: object) -> Tensor:
            value = task.loss(output, target)
            self._mark(BACKWARD, REST)
            return value

        repeated = _Repeated(data, size, lambda: self._mark(FORWARD, REST))
        marked = with_data(dataclasses.replace(task, loss=loss), repeated)
        self._trainer = Trainer(marked, model, Settings(batch_size=size, drop_last=True))

    def _mark(self, phase: str, layer: str) -> None:
        self._marks.append(((phase, layer), self._clock.mark()))

    def step(self) -> float:
        self._marks.clear()
        begin = time.perf_counter()
        self._mark(INPUT, REST)
        self._trainer.compute(Batch(0, self._number % self._trainer.order.batches))
        self._mark("", "")
        wall = time.perf_counter() - begin
        self._number += 1
        parts: dict[Part, float] = {}
        seconds = self._clock.between([moment for _, moment in self._marks])
        for (part, _), duration in zip(self._marks, seconds, strict=False):
            parts[part] = parts.get(part, 0.0) + duration
        self._times.append(parts)
        total = sum(seconds)
        self.busy.append(wall / total if self._clock.of_thread and total else 1.0)
        return total

    def forget(self) -> None:
        """Drop the times of steps that only warmed up caches."""
        self._times.clear()
        self.busy.clear()

    def burst(self) -> None:
        with _hooked(self._model, self._names, self._mark):
            end = time.perf_counter() + BURST
            if self.step() < BURST:
                # this step began with another size's data in the caches
                self._times.pop()
                self.busy.pop()
                self.step()
            while time.perf_counter() < end:
                self.step()

    def _median(self, phase: str, layer: str | None = None) -> float:
        return statistics.median(
            sum(s for (p, name), s in parts.items() if p == phase and layer in (None, name)) for parts in self._times
        )

    def point(self) -> StepTime:
        """Return the lower quartile of the steps' times, divided into phases in proportion to their medians."""
        totals = sorted(sum(seconds.values()) for seconds in self._times)
        parts = {phase: self._median(phase) for phase in PHASES}
        scale = totals[len(totals) // 4] / max(1e-12, sum(parts.values()))
        return StepTime(self._size, **{phase: scale * seconds for phase, seconds in parts.items()}, steps=len(totals))

    def layers(self, point: StepTime) -> dict[str, tuple[float, float]]:
        """Return the seconds forward and backward of each layer, scaled to a step without hooks."""
        both = []
        for phase, whole in ((FORWARD, point.forward), (BACKWARD, point.backward)):
            parts = {name: self._median(phase, name) for name in self._names}
            scale = whole / max(1e-12, sum(parts.values()))
            both.append({name: scale * seconds for name, seconds in parts.items()})
        return {name: (both[0][name], both[1][name]) for name in self._names}


class _Repeated:
    """Data set that repeats up to whole minibatches of one size, and reports each gathered minibatch."""

    def __init__(self, data: Data, size: int, gathered: Callable[[], None]) -> None:
        self._data, self._gathered = data, gathered
        self._samples = max(1, len(data) // size) * size

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Tensor) -> tuple[object, object]:
        samples = self._data.batch(indices % len(self._data))
        self._gathered()
        return samples


@contextlib.contextmanager
def _hooked(model: nn.Module, names: Sequence[str], mark: Callable[[str, str], None]) -> Iterator[None]:
    """Mark when each layer begins and ends forward, and when the gradient of its output exists."""

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
    """Return a note if steps took much longer than their CPU time."""
    long = f"the machine is busy: a step took {busy:.2f} times its CPU time"
    return [f"{long}; times shown are CPU times"] if busy > BUSY else []


class StepClock:
    """Clock of the thread's CPU time."""

    of_thread = True
    """True if it stands still while the thread waits for a processor."""

    def mark(self) -> Any:
        """Return the present moment."""
        return time.thread_time_ns()

    def between(self, moments: Sequence[Any]) -> list[float]:
        """Return the seconds from each moment to the next."""
        return [(after - before) / 1e9 for before, after in itertools.pairwise(moments)]


class _DeviceClock(StepClock):
    """Clock of a CUDA device, current or not, by events in its stream."""

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
    """Return the clock for work on a device: its events, or the thread's CPU time."""
    place = torch.device(device)
    return _DeviceClock(place) if place.type == "cuda" else StepClock()


MEASURED = 1 << 24
"""Most elements to step: beyond the caches, time grows in proportion."""
STEPS, SECONDS = 5, 0.05
"""Least number of measured steps, and their least total seconds; the lower quartile counts."""


class UpdateCost(msgspec.Struct, frozen=True):
    """Cost of an optimizer's update."""

    optimizer: str
    seconds: float
    state: int


def measure_update(optimizer: Optimizer, elements: int, device: str = "cpu") -> UpdateCost:
    """Time steps on a flat parameter of float32, as a shard computes them, with one thread.

    >>> from distbelief.core.optimizer import optim
    >>> measure_update(optim("adam"), 1000).state >= 2 * 4 * 1000
    True
    """
    held = min(max(1, elements), MEASURED)
    parameter = torch.zeros(held, device=device)
    parameter.grad = torch.full_like(parameter, 1e-3)
    step, seconds = stepper(updater := build(optimizer, [{"params": [parameter]}])), list[float]()
    clock, begin = clock_of(device), time.perf_counter()
    with threads(1), torch.no_grad():
        step()
        while len(seconds) < STEPS or time.perf_counter() < begin + SECONDS:
            start = clock.mark()
            step()
            seconds += clock.between([start, clock.mark()])
    kept = sum(leaf.nbytes for leaf in tree_leaves(list(updater.state.values())) if isinstance(leaf, torch.Tensor))
    scale = elements / held
    return UpdateCost(optimizer.name, sorted(seconds)[len(seconds) // 4] * scale, round(kept * scale))
