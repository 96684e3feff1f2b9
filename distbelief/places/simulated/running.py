"""Run of a job on a simulated cluster, from its start to its end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from distbelief.core import roles
from distbelief.core.records import Finished, Json, cause_of
from distbelief.core.settings import Settings
from distbelief.errors import Interrupted, JobFailed
from distbelief.job import Job
from distbelief.places.attempt import Attempt, evaluates
from distbelief.places.compute_model import Stopwatch
from distbelief.places.explanation import Explanation
from distbelief.places.signals import WORDS, handled
from distbelief.places.simulated.alone import Alone
from distbelief.places.simulated.handling import HandlingCosts
from distbelief.places.simulated.simulation import Simulation, task_of
from distbelief.places.simulated.virtual_cluster import VirtualCluster
from distbelief.places.view import View
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.runtime.clock import VirtualClock
from distbelief.strategies.base import DIRECT, is_alone


def run(cluster: VirtualCluster, job: Job, settings: Settings, view: View | None) -> Json:
    """Run a job whose settings are checked; return the content of `result.json`, with `seconds` of virtual time.

    Raises:
        JobFailed: every replica died, or Ctrl-C came twice; after the first, the job ends in order.
    """
    evaluates(settings, task_of(job))
    with _interrupts() as stopped:
        more: Json = {"cluster": cluster.described()}
        if "path" in job.strategy.meaningless and job.strategy.needs_memory(settings, "virtual"):
            more["path"] = DIRECT
        attempt = Attempt(job, settings, view, 0.0, cluster.keep or job.out is not None, more)
        clock = VirtualClock()
        try:
            if not is_alone(job.strategy):
                simulation = Simulation(job, settings, cluster, attempt.record, attempt, clock, stopped=stopped)
                supervisor = simulation.supervisor
                simulation.run()
                attempt.recorder.job.update(simulation.traffic(attempt.recorder.summary.steps))
            else:
                costs = HandlingCosts(cluster.handling, settings, lambda: 0)
                stopwatch = Stopwatch(cluster.compute, 0, job.seed)
                alone = Alone(attempt, stopwatch, costs, clock, stopped, not cluster.phantom)
                supervisor = alone.supervisor
                alone.run()
            attempt.keep_folder(clock.now())
        except BaseException as error:
            twice = isinstance(error, KeyboardInterrupt)
            told = _cut_short(attempt) if twice else error
            attempt.record(clock.now(), roles.SUPERVISOR, Finished.of(cause_of(told), str(told)))
            attempt.finish()
            if twice:
                raise told from None
            raise
        failure, record = supervisor.conclude()
        if record is not None:
            attempt.record(clock.now(), roles.SUPERVISOR, record)
        result = attempt.finish()
        if failure is not None:
            raise failure
        return {**result, "events": clock.events}


def _cut_short(attempt: Attempt) -> JobFailed:
    """Return the error for a simulation that was interrupted twice; it names the checkpoint to resume from."""
    what = "interrupted twice: ended at once, without a checkpoint"
    if attempt.folder is None:
        return Interrupted(what)
    run = attempt.folder.path
    newest = Checkpoints(run).latest()
    return Explanation(read_manifest(newest).number if newest else 0, str(run)).failed(what, Interrupted)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], str | None]]:
    """Handle signals while the block runs; yield a function that returns the name of the first one, or None.

    The second signal interrupts the block at once.
    """
    came: list[str] = []

    def interrupt(number: int, _frame: object) -> None:
        came.append(WORDS[signal.Signals(number)])
        if len(came) > 1:
            raise KeyboardInterrupt

    with handled(interrupt):
        yield lambda: came[0] if came else None
