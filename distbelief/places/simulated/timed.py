"""Who computes in a simulation: at once, and answers when the simulated step is over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.places.compute_model import Stopwatch
from distbelief.tasks import Data, Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, measure
from distbelief.transport.base import Arena
from distbelief.transport.processors import Thread


def with_data(task: Task, data: Data) -> Task:
    """The task with its training set loaded, shared by all simulated replicas."""
    return dataclasses.replace(task, train=lambda: data).named(task.reference)


class TimedWorker:
    """Computes real gradients at once, and answers when the simulated step is over."""

    def __init__(self, thread: Thread, stopwatch: Stopwatch, vectors: FlatModule, trainer: Trainer) -> None:
        self._thread, self._stopwatch, self._vectors, self._trainer = thread, stopwatch, vectors, trainer

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Take the vectors of the arena."""
        self._vectors.bind(arena.gradients, arena.parameters)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch, when its time has passed."""
        computed, seconds = self._trainer.compute(batch), self._stopwatch.draw()
        self._thread.step(seconds, answer, Computed(computed.loss, computed.samples, seconds))
        return None

    def measure(self) -> Measured:
        """The current parameters on the test set."""
        raise UsageError("a replica measures nothing")


class TimedPhantom:
    """Computes nothing, and answers when the simulated step is over."""

    def __init__(self, thread: Thread, stopwatch: Stopwatch, samples: int, batch_size: int) -> None:
        self._thread, self._stopwatch, self._samples, self._batch_size = thread, stopwatch, samples, batch_size

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Nothing to bind."""

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch, when its time has passed."""
        seconds = self._stopwatch.draw()
        samples = min(self._batch_size, self._samples - batch.index * self._batch_size)
        self._thread.step(seconds, answer, Computed(None, samples, seconds))
        return None

    def measure(self) -> Measured:
        """The current parameters on the test set."""
        raise UsageError("a phantom measures nothing")


class Watcher:
    """Measures for the evaluator; in no simulated time, as it is outside every clock."""

    def __init__(self, task: Task, vectors: FlatModule) -> None:
        self._task, self._vectors = task, vectors

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Take the vectors of the arena."""
        self._vectors.bind(arena.gradients, arena.parameters)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch, when its time has passed."""
        raise UsageError("the evaluator computes no gradients")

    def measure(self) -> Measured:
        """The current parameters on the test set."""
        return measure(self._task, self._vectors.module)
