"""Simulation of a job in a single process: a loop on one virtual machine, without messages."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.records import Record
from distbelief.places.attempt import Attempt
from distbelief.places.compute_model import Stopwatch
from distbelief.places.evaluate import threads
from distbelief.places.place import NEVER, Said
from distbelief.places.simulated.handling import HandlingCosts
from distbelief.places.simulated.simulation import model_of, task_of, without_loss
from distbelief.places.supervisor import Supervisor
from distbelief.runtime.clock import VirtualClock
from distbelief.strategies.cast import phantom
from distbelief.strategies.context import LoopContext, LoopSteps


class Alone:
    """Simulation of a loop; a step takes the time that the compute model draws, and that of its update.

    Args:
        attempt: attempt at the job; it takes the records, and has the starting point.
        stopped: called after each step; returns the reason to end the loop, or None to go on.
        computes: whether steps are computed; otherwise only time passes.
    """

    def __init__(
        self,
        attempt: Attempt,
        stopwatch: Stopwatch,
        costs: HandlingCosts,
        clock: VirtualClock,
        stopped: Callable[[], str | None],
        computes: bool,
    ) -> None:
        self._attempt, self._computes = attempt, computes
        self._clock, self._stopwatch, self._message_costs = clock, stopwatch, costs
        self.supervisor = Supervisor(0, deadlines=NEVER)
        job, settings, folder = attempt.job, attempt.settings, attempt.folder
        task = task_of(job)
        run = str(folder.path) if folder is not None and computes else ""
        self.model = model_of(job, task)
        self._loop = job.strategy.loop(
            LoopContext(task, self.model, settings, self._note, stopped, run, attempt.start, clock.now, self._timed)
        )

    def _note(self, record: Record) -> None:
        self._attempt.record(self._clock.now(), roles.SINGLE, record if self._computes else without_loss(record))
        self.supervisor.handle(self._clock.now(), Said(roles.SINGLE, 0, record))

    def run(self) -> None:
        with threads(self._attempt.job.threads):
            self._loop.run()

    def _timed(self, steps: LoopSteps) -> LoopSteps:
        """Return the steps of the loop on simulated time; without `computes`, only time passes."""
        clock, seconds = self._clock, self._message_costs.update(steps.trained)
        counted = phantom(steps.samples, self._attempt.settings.batch_size)

        def compute(batch: Batch) -> Computed:
            computed = steps.compute(batch) if self._computes else counted(batch, lambda _: None)
            assert computed is not None
            took = self._stopwatch.draw()
            clock.events += 1
            clock.time += took
            return msgspec.structs.replace(computed, seconds=took, load=0.0)

        def update() -> None:
            if self._computes:
                steps.update()
            clock.time += seconds

        return steps._replace(compute=compute, update=update)
