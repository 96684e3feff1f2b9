"""Simulated computing: a step is computed at once, and answered when its simulated time has passed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from distbelief.core.effects import Batch
from distbelief.places.compute_model import Stopwatch
from distbelief.runtime.player import Answer, Compute
from distbelief.strategies.context import StepTiming
from distbelief.transport.cluster_model import Thread


def timed(compute: Compute, thread: Thread, stopwatch: Stopwatch, timing: StepTiming) -> Compute:
    """Return a step that computes at once, and answers when its simulated time has passed."""

    def step(batch: Batch, answer: Answer) -> None:
        computed = compute(batch, answer)
        assert computed is not None
        seconds = stopwatch.draw()
        if timing.more:
            thread.owe(timing.more)
        thread.step(seconds * timing.first, answer, msgspec.structs.replace(computed, seconds=seconds, load=0.0))

    return step


def timed_work(
    thread: Thread, stopwatch: Stopwatch, timing: StepTiming
) -> Callable[[float, bool, Callable[[bool], None]], None]:
    """Return a function that lets a share of a step's time pass; each step draws its time when it begins."""
    step = 0.0

    def work(share: float, begins: bool, answer: Callable[[bool], None]) -> None:
        nonlocal step
        if begins:
            step = stopwatch.draw()
            if timing.more:
                thread.owe(timing.more)
        thread.step(step * share, answer, True)

    return work
