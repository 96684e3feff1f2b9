"""What computes in a simulation: at once, and answers when the simulated step is over."""

from __future__ import annotations

from distbelief.core.effects import Batch, Computed
from distbelief.places.compute_model import Stopwatch
from distbelief.runtime.player import Answer, Compute
from distbelief.strategies.context import StepTiming
from distbelief.transport.processors import Thread


def timed(compute: Compute, thread: Thread, stopwatch: Stopwatch, timing: StepTiming) -> Compute:
    """The same, answered when its simulated time has passed."""

    def step(batch: Batch, answer: Answer) -> None:
        computed = compute(batch, answer)
        assert computed is not None
        seconds = stopwatch.draw()
        if timing.more:
            thread.owe(timing.more)
        thread.step(seconds * timing.first, answer, Computed(computed.loss, computed.samples, seconds))

    return step


def phantom(samples: int, batch_size: int) -> Compute:
    """Counts the samples of a minibatch, of so many in an epoch, and computes nothing."""
    return lambda batch, _: Computed(None, min(batch_size, samples - batch.index * batch_size), 0.0)
