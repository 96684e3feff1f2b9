"""Speed of the virtual cluster with phantoms."""

from __future__ import annotations

import heapq
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial

from benchmarks.parts.timing import BenchOptions, Measured, Table, figure, interleave, ratio
from benchmarks.parts.workloads import counted
from distbelief.core.messages import Message
from distbelief.job import Job
from distbelief.lab import number
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.strategies import Downpour

BATCH = 64
SHARE = 0.03
"""Target: messages per second, relative to the events per second of a bare queue of the same size."""
EVENTS = 200_000
"""Events in one turn of the bare queue."""


@dataclass(frozen=True)
class SimulatorOptions(BenchOptions):
    """Options of the benchmark simulator."""

    replicas: int = 1000
    """Replicas of the virtual cluster."""
    shards: int = 16
    """Shards of the virtual cluster."""
    steps: int = 20
    """Steps of each replica."""
    repeats: int = 3
    """Number of runs."""


def run(options: SimulatorOptions) -> Measured:
    """Measure."""
    # counted in a separate run, which is not timed: the same seed gives the same messages
    messages = _messages(options)
    own: list[float] = []
    taken = interleave({"run": partial(_run, options, own), "queue": _queue}, options.repeats)
    seconds, share = taken["run"], messages / EVENTS * ratio(taken["queue"], own)
    median = statistics.median(seconds)
    size = {"replicas": options.replicas, "shards": options.shards, "steps": options.steps}
    rate, cpu = messages / median, statistics.median(own)
    row = [" x ".join(map(str, size.values())), f"{messages:,}", number(median), number(cpu), number(rate)]
    columns = ("replicas x shards x steps", "messages", "seconds", "of CPU", "messages/s")
    times = {"seconds": median, "cpu_seconds": cpu, "runs": seconds, "messages_per_second": rate}
    return Measured(
        {**size, "messages": messages, **times},
        [figure("messages a second, relative to events of a bare queue", share, SHARE)],
        [Table("the virtual cluster, nothing computed", columns, [row])],
    )


def _simulation(options: SimulatorOptions) -> Simulation:
    strategy = Downpour(replicas=options.replicas, shards=options.shards)
    task = counted(options.replicas * options.steps * BATCH)
    job = Job(task=task, strategy=strategy, batch_size=BATCH, evaluate_every=0, checkpoint_every=0)
    return Simulation(job, job.settings(), Simulated(phantom=True), lambda *_: None)


def _run(options: SimulatorOptions, own: list[float]) -> float:
    """Measure the seconds of a run, including making the cluster; append the CPU seconds of the thread to `own`."""
    start, cpu = time.perf_counter(), time.thread_time()
    _simulation(options).run()
    own.append(time.thread_time() - cpu)
    return time.perf_counter() - start


def _queue() -> float:
    """Measure the CPU seconds of a bare queue of events, each a small object that adds the next."""
    start, chance = time.thread_time(), random.Random(0)
    waiting = [(chance.random(), event, (event, "event")) for event in range(1000)]
    heapq.heapify(waiting)
    for event in range(1000, 1000 + EVENTS):
        moment, _, (who, what) = heapq.heappop(waiting)
        heapq.heappush(waiting, (moment + chance.random(), event, (who + 1, what)))
    return time.thread_time() - start


def _messages(options: SimulatorOptions) -> int:
    """Count the messages delivered in a run."""
    simulation, count = _simulation(options), 0

    def watch(*_: str | Message) -> None:
        nonlocal count
        count += 1

    simulation.network.watch = watch
    simulation.run()
    return count
