"""One run of a simulated `single`: the plain loop on one virtual machine, with the step times of the compute model and
nobody to talk to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.records import Record
from distbelief.core.settings import Settings
from distbelief.job import Job
from distbelief.places.attempt import Attempt
from distbelief.places.compute_model import Stopwatch
from distbelief.places.place import NEVER, Said
from distbelief.places.simulated.handling import Labour
from distbelief.places.simulated.simulation import model_of, task_of, without_loss
from distbelief.places.supervisor import Supervisor
from distbelief.runtime.clock import VirtualClock
from distbelief.strategies.single.loop import SingleLoop


class Alone:
    """A simulation of the plain loop; a step takes what the compute model says, and the time of the update that it ends
    with.

    Args:
        job: what is run.
        settings: of it.
        stopwatch: of its steps.
        labour: what its updates cost.
        attempt: takes the records, and knows where to go on.
        clock: of the simulation.
        stopped: says, after each step, why the loop is to end; None while it is not.
        phantom: compute nothing.
    """

    def __init__(
        self, job: Job, settings: Settings, stopwatch: Stopwatch, labour: Labour, attempt: Attempt, clock: VirtualClock,
        stopped: Callable[[], str | None], phantom: bool,
    ) -> None:  # fmt: skip
        self._job, self._attempt, self._clock, self._phantom = job, attempt, clock, phantom
        self.supervisor = Supervisor(0, deadlines=NEVER)
        task, folder = task_of(job), attempt.folder
        run = str(folder.path) if folder is not None and not phantom else ""
        kind = _Phantom if phantom else _Timed
        self._loop = kind(
            clock, stopwatch, labour, task, model_of(job, task), settings, self._note, stopped, run, clock.now
        )

    def _note(self, record: Record) -> None:
        self._attempt.record(self._clock.now(), roles.SINGLE, without_loss(record) if self._phantom else record)
        self.supervisor.handle(self._clock.now(), Said(roles.SINGLE, 0, record))

    def run(self) -> None:
        """Train to the end."""
        threads, attempt = torch.get_num_threads(), self._attempt
        torch.set_num_threads(self._job.threads)
        try:
            self._loop.run(
                attempt.checkpoint, attempt.position if attempt.checkpoint else None, attempt.samples, attempt.number
            )
        finally:
            torch.set_num_threads(threads)


class _Timed(SingleLoop):
    """The plain loop, on simulated time: with what takes how long, and then what the loop is given."""

    def __init__(self, clock: VirtualClock, stopwatch: Stopwatch, labour: Labour, *loop: Any) -> None:
        super().__init__(*loop)
        self._clock, self._stopwatch = clock, stopwatch
        self._updating = labour.update(self._flat.layout.trained.size)

    def compute(self, batch: Batch) -> Computed:
        """The gradient of a minibatch, as long as the compute model says after the step began."""
        return msgspec.structs.replace(super().compute(batch), seconds=self._passed())

    def _passed(self) -> float:
        seconds = self._stopwatch.draw()
        self._clock.events += 1
        self._clock.time += seconds
        return seconds

    def update(self) -> None:
        """Step, which takes its time."""
        super().update()
        self._clock.time += self._updating


class _Phantom(_Timed):
    """One that computes nothing."""

    def compute(self, batch: Batch) -> Computed:
        """Only the time that passes."""
        size = self.settings.data.batch_size
        return Computed(None, min(size, self._plan.samples - batch.index * size), self._passed())

    def update(self) -> None:
        """Only the time that passes."""
        self._clock.time += self._updating
