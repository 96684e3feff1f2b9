"""A model and the same one split, by turns on one minibatch in this process: what each segment takes and keeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distbelief.lab.cost.profile import StepClock
from distbelief.schedules.pipeline import Crossing, Pass, Pipeline, SegmentTask
from distbelief.schedules.pipeline_price import SegmentCost
from distbelief.split.play import Microbatch, Passes, cut_minibatch, play
from distbelief.split.program import PartitionProgram
from distbelief.tasks.task import Task
from distbelief.tasks.worker import load, on_device

LEAST_ROUNDS, MOST_ROUNDS = 3, 60
"""Of both, after a first in which nothing is timed."""


class Ran(NamedTuple):
    """A segment, one way."""

    partition: int
    segment: int
    direction: Pass


class Turns:
    """Steps of both, on one minibatch."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        programs: Sequence[PartitionProgram],
        made: Pipeline,
        batch_size: int,
        clock: StepClock,
    ) -> None:
        self._task, self._model, self._programs, self._made = task, model, programs, made
        self._data, self._clock, self._device = load(task, "training"), clock, next(model.parameters()).device
        self._indices = torch.arange(batch_size) % len(self._data)
        inputs, targets = self._gathered()
        self._batches = cut_minibatch((inputs,), targets, made.microbatches)
        self._wholes: list[tuple[float, float]] = []
        self._splits: list[dict[Ran, float]] = []
        self._kept: dict[Ran | None, int] = {}
        self.kept = 0
        """Bytes that the whole model keeps for its way back."""
        self.busy = 1.0
        """The wall's time, as a multiple of the thread's; 1 where that is not what times it."""
        for layer in (layer for program in programs for layer in program.layers):
            layer.train()

    def take(self, seconds: float, told: Callable[[str], None]) -> None:
        """Compute: once to see what is kept, then until there are enough rounds or the time is over."""
        self._keep()
        begin, worked = time.perf_counter(), time.thread_time()
        end = begin + seconds
        while len(self._splits) < LEAST_ROUNDS or (len(self._splits) < MOST_ROUNDS and time.perf_counter() < end):
            self._wholes.append(self._whole_step())
            self._splits.append(self._split_step(_SegmentMeter(self._clock)).took)
            told(f"round {len(self._splits)} of the whole model and the split one")
        if self._clock.of_thread:
            self.busy = (time.perf_counter() - begin) / (time.thread_time() - worked)

    def whole(self) -> tuple[float, float]:
        """Seconds of gathering a minibatch, and of computing its gradient, in the whole model."""
        gathered, computed = zip(*self._wholes, strict=True)
        return statistics.median(gathered), statistics.median(computed)

    def costs(self) -> list[SegmentCost]:
        """Of each segment of the schedule, for a microbatch."""
        parts, costs = self._made.microbatches, []
        for number, segment in enumerate(self._made.graph.segments):
            there, back = (Ran(segment.partition, number, way) for way in Pass)
            kept = self._kept.get(there, 0) // parts
            costs.append(SegmentCost(self._median(there) / parts, self._median(back) / parts, kept=kept))
        return costs

    def _median(self, ran: Ran) -> float:
        return statistics.median(one.get(ran, 0.0) for one in self._splits)

    def _whole_step(self) -> tuple[float, float]:
        _forget([self._model])
        begin = self._clock.mark()
        inputs, targets = self._gathered()
        gathered = self._clock.mark()
        self._task.loss(self._model(inputs), targets).backward()
        gathers, computes = self._clock.between([begin, gathered, self._clock.mark()])
        return gathers, computes

    def _gathered(self) -> tuple[object, object]:
        """The minibatch, where it is computed."""
        inputs, targets = self._data.batch(self._indices)
        return on_device(inputs, self._device), on_device(targets, self._device)

    def _split_step(self, watch: _SegmentMeter) -> _SegmentMeter:
        _forget(program.module for program in self._programs)
        play([_Watched(program, self._batches, watch) for program in self._programs], self._made.actions)
        watch.add_up()
        return watch

    def _keep(self) -> None:
        """See what autograd keeps: of the whole model, and of each segment beside what it received."""
        modules = [self._model, *(program.module for program in self._programs)]
        held = {_address(one) for module in modules for one in (*module.parameters(), *module.buffers())}
        watch = _SegmentMeter(self._clock, held)
        with saved_tensors_hooks(watch.keep, lambda saved: saved):
            self._whole_step()
        self.kept = watch.kept.get(None, 0)
        watch = _SegmentMeter(self._clock, held)
        with saved_tensors_hooks(watch.keep, lambda saved: saved):
            self._split_step(watch)
        self._kept = watch.kept


class _SegmentMeter:
    """What segments take, and what they keep that is not held or received anyway."""

    def __init__(self, clock: StepClock, held: Iterable[int] = ()) -> None:
        self._clock = clock
        self._ran: list[tuple[Ran, Any, Any]] = []
        """What has run, and the moments of its beginning and end: asking how far they are apart waits for a device."""
        self.took: dict[Ran, float] = {}
        self.running: Ran | None = None
        self.kept: dict[Ran | None, int] = {}
        """Bytes; None is the whole model."""
        self._held = {*held}
        self._here: set[tuple[int, int]] = set()
        """Tensors that each partition has received or keeps already."""
        self._alive: list[Tensor] = []
        """So that no address is that of two."""

    def begin(self, ran: Ran | None) -> Any:
        """Something runs now; returns the moment."""
        self.running = ran
        return self._clock.mark()

    def end(self, begun: Any) -> None:
        """It has ended."""
        if self.running is not None:
            self._ran.append((self.running, begun, self._clock.mark()))

    def add_up(self) -> None:
        """Say how long each took."""
        for ran, *moments in self._ran:
            self.took[ran] = self.took.get(ran, 0.0) + sum(self._clock.between(moments))

    def receive(self, partition: int, tensor: Tensor) -> None:
        """Something has come to a partition."""
        self._here.add((partition, _address(tensor)))
        self._alive.append(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Autograd keeps something for the way back."""
        address, partition = _address(tensor), self.running.partition if self.running else -1
        if address not in self._held and (partition, address) not in self._here:
            self._here.add((partition, address))
            self.kept[self.running] = self.kept.get(self.running, 0) + tensor.untyped_storage().nbytes()
            self._alive.append(tensor)
        return tensor


class _Watched(Passes):
    """Passes through a partition, whose segments are timed."""

    def __init__(self, program: PartitionProgram, batches: Sequence[Microbatch], watch: _SegmentMeter) -> None:
        super().__init__(program, batches)
        self._watch = watch

    def run(self, task: SegmentTask) -> None:
        """Compute a segment."""
        begun = self._watch.begin(Ran(self.program.partition, task.segment, task.direction))
        super().run(task)
        self._watch.end(begun)

    def take(self, crossing: Crossing, tensor: Tensor) -> None:
        """Take what another partition has given."""
        self._watch.receive(self.program.partition, tensor)
        super().take(crossing, tensor)


def _forget(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
