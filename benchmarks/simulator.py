"""How fast the virtual cluster runs where nothing is computed; and, asked to validate, how near its
times are to real ones.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks import validate
from benchmarks.parts.timing import BenchOptions, figure, finish, interleave, ratio
from benchmarks.parts.workloads import counted
from distbelief.cli.tables import number, show
from distbelief.core.messages import Message
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.record.machine import machine
from distbelief.strategies import Downpour

BATCH = 64
SHARE = 0.03
"""The figure to reach: messages a second, of the events of a bare queue that hold as much."""
EVENTS = 200_000
"""In a turn of that queue."""


@dataclass(frozen=True)
class SimulatorOptions(BenchOptions):
    """Options of the benchmark simulator."""

    replicas: int = 1000
    """Replicas of the virtual cluster."""
    shards: int = 16
    """Its shards."""
    steps: int = 20
    """Steps of each replica."""
    repeats: int = 3
    """Times it is run."""
    validate: bool = False
    """Run the same jobs on real processes and in simulation instead, and compare their times."""
    only: tuple[str, ...] = ()
    """With --validate, the jobs whose names begin so: mlp, lenet, '4 padded'."""
    QUICK: ClassVar[Mapping[str, Any]] = {"replicas": 50, "repeats": 1}
    """Defaults with --quick."""


def run(options: SimulatorOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: --only without --validate, or no such job.
        DataError: --validate, and there is no MNIST.
    """
    if options.validate:
        return _validate(options)
    if options.only:
        raise UsageError(
            f"--only {' '.join(options.only)}: names jobs that --validate compares; give that too, or leave it off"
        )
    # counted in a run of its own, which is not timed: the same seed, the same messages
    facts, messages = (
        machine(),
        _messages(options.replicas, options),
    )
    own: list[float] = []
    taken = interleave({"run": lambda: _run(options.replicas, options, own), "queue": _queue}, options.repeats)
    seconds, share = taken["run"], messages / EVENTS * ratio(taken["queue"], own)
    median = statistics.median(seconds)
    result: Json = {
        "bench": "simulator",
        "machine": facts,
        "replicas": options.replicas,
        "shards": options.shards,
        "steps": options.steps,
        "messages": messages,
        "seconds": median,
        "messages_per_second": messages / median,
        "runs": seconds,
        "cpu_seconds": statistics.median(own),
        "figures": [],
    }
    if not options.quick:
        result["figures"].append(figure("messages a second, of events of a bare queue", share, SHARE))
    if not options.quiet:
        row = [
            f"{options.replicas} x {options.shards} x {options.steps}",
            f"{messages:,}",
            number(median),
            number(statistics.median(own)),
            number(messages / median),
        ]
        show(
            "the virtual cluster, nothing computed",
            ("replicas x shards x steps", "messages", "seconds", "of CPU", "messages/s"),
            [row],
        )
    return finish(result, options)


def _validate(options: SimulatorOptions) -> Json:
    """Compare times, real and simulated."""
    usual = SimulatorOptions(**(options.QUICK if options.quick else {}))
    for name in ("replicas", "shards", "steps"):
        if (value := getattr(options, name)) != getattr(usual, name):
            raise UsageError(f"--{name} {value}: --validate compares jobs of its own: leave one of them off")
    facts = machine()
    found = validate.measure(options.repeats, options.quick, options.only)
    result = {
        "bench": "simulator",
        "machine": facts,
        **found,
        "figures": [] if options.quick else validate.figures(found),
    }
    if not options.quiet:
        validate.tell(found)
    return finish(result, options)


def _simulation(replicas: int, options: SimulatorOptions) -> Simulation:
    strategy = Downpour(replicas=replicas, shards=options.shards)
    task = counted(replicas * options.steps * BATCH)
    job = Job(task=task, strategy=strategy, batch_size=BATCH, evaluate_every=0, checkpoint_every=0)
    return Simulation(job, job.settings(), Simulated(phantom=True), lambda *_: None)


def _run(replicas: int, options: SimulatorOptions, own: list[float]) -> float:
    """Seconds of a run, from making the cluster to its end; the thread's own CPU seconds are added to `own`."""
    start, cpu = time.perf_counter(), time.thread_time()
    _simulation(replicas, options).run()
    own.append(time.thread_time() - cpu)
    return time.perf_counter() - start


def _queue() -> float:
    """CPU seconds of a bare queue of events: each is a small object, taken out by its time, and puts in the next."""
    start, chance = time.thread_time(), random.Random(0)
    waiting = [(chance.random(), event, (event, "event")) for event in range(1000)]
    heapq.heapify(waiting)
    for event in range(1000, 1000 + EVENTS):
        moment, _, (who, what) = heapq.heappop(waiting)
        heapq.heappush(waiting, (moment + chance.random(), event, (who + 1, what)))
    return time.thread_time() - start


def _messages(replicas: int, options: SimulatorOptions) -> int:
    """The messages that are delivered in a run."""
    simulation, count = _simulation(replicas, options), 0

    def watch(*_: str | Message) -> None:
        nonlocal count
        count += 1

    simulation.network.watch = watch
    simulation.run()
    return count
