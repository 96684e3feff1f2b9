"""Measurement of candidates on this machine: real jobs of a few seconds each, by successive halving.

After a short run of each, the best third goes on to longer runs, until three or fewer are left. These take turns, as a
machine's speed varies, and their means decide.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from distbelief.core.records import Outcome
from distbelief.errors import DistbeliefError, Interrupted, UsageError
from distbelief.job import Job
from distbelief.lab.cost.options import PlanRequest
from distbelief.lab.plan.candidates import PlanCandidate
from distbelief.lab.plan.pricing import Terms, terms_of
from distbelief.places import signals
from distbelief.places.processes.local import Local
from distbelief.record.limits import cores
from distbelief.record.summary import PARTS
from distbelief.tasks import Task

FINALISTS, TURNS = 3, 2
"""Most candidates of the last rung, and runs of each there."""
LEAST_SECONDS, LEAST_STEPS = 0.5, 3
MOST_EPOCHS = 1_000_000
"""Epochs of a run, whose budget ends it long before."""
LOCK = "\0distbelief-plan"
"""Name in the kernel that a measuring plan holds; it ends with the process."""
SPIN_SECONDS, BLOCK = 0.3, bytes(1 << 20)
"""Time of testing whether the cores are free, and the bytes to hash meanwhile."""


class Measurements(NamedTuple):
    """Measurements by names of candidates."""

    terms: dict[str, Terms]
    """Terms, the best first: later rungs before earlier ones."""
    failed: dict[str, str]


def measure(
    task: Task | str,
    candidates: Sequence[PlanCandidate],
    request: PlanRequest,
    tell: Callable[[str], None],
    halved: bool = True,
) -> Measurements:
    """Run candidates on this machine within the request's seconds, if that allows each a few steps.

    If halved, only the best go on to longer runs; else all take turns with equal runs.
    """
    seconds = request.seconds
    terms: dict[str, Terms] = {}
    failed: dict[str, str] = {}
    left, begun = list(candidates), time.monotonic()
    counts = _rungs(len(left)) if halved else [len(left)]
    overhead, slowest = 0.0, 0.0
    for rung, count in enumerate(counts, 1):
        turns = TURNS if rung == len(counts) and count > 1 else 1
        runs = [candidate for turn in range(turns) for candidate in left[:count][:: -1 if turn % 2 else 1]]
        seen: dict[str, list[Terms]] = {}
        for at, candidate in enumerate(runs):
            start = time.monotonic()
            if at >= len(runs) / turns and start > begun + seconds:
                break  # each candidate has run once
            share = (begun + seconds * rung / len(counts) - start) / (len(runs) - at)
            trained = max(LEAST_SECONDS, LEAST_STEPS * slowest, share - overhead)
            tell(f"rung {rung} of {len(counts)}, run {at + 1} of {len(runs)}: {candidate}, {trained:.1f} s")
            try:
                seen.setdefault(str(candidate), []).append(run(task, candidate, request, trained))
            except DistbeliefError as error:  # a failed candidate does not end the plan
                failed[str(candidate)] = " ".join(str(error).split())
                continue
            slowest = max(slowest, seen[str(candidate)][-1].step)
            started = time.monotonic() - start - trained
            overhead = max(0.0, min(overhead, started) if overhead else started)
        means = {what: _mean(measured) for what, measured in seen.items() if what not in failed}
        left = sorted((c for c in left if str(c) in means), key=lambda c: -means[str(c)].samples_per_second)
        behind = {what: measured for what, measured in terms.items() if what not in seen}
        terms = {str(candidate): means[str(candidate)] for candidate in left} | behind
    return Measurements(terms, failed)


def _rungs(count: int) -> list[int]:
    """Return the number of candidates in each rung.

    >>> _rungs(9), _rungs(30), _rungs(2)
    ([9, 3], [30, 10, 4, 2], [2])
    """
    counts = [count]
    while counts[-1] > FINALISTS:
        counts.append(math.ceil(counts[-1] / 3))
    return counts


def _mean(measured: Sequence[Terms]) -> Terms:
    means = {name: statistics.fmean(getattr(run, name) for run in measured) for name in (*PARTS, "samples_per_second")}
    return msgspec.structs.replace(measured[-1], **means)


def run(task: Task | str, candidate: PlanCandidate, request: PlanRequest, seconds: float) -> Terms:
    """Train with a candidate for some seconds."""
    caught: list[object] = []
    # a signal while the folder is created or removed would leave it behind; the job handles signals itself
    with signals.handled(lambda *_: caught.append(0)), tempfile.TemporaryDirectory(prefix="distbelief-plan-") as folder:
        job = Job(
            task,
            candidate.strategy,
            epochs=MOST_EPOCHS,
            batch_size=request.batch_size,
            evaluate_every=0,
            checkpoint_every=0,
            snapshot_every="0",
            data_dir=request.data_dir,
            out=f"{folder}/run",
            budget=f"{seconds:.3f}s",
        )
        try:
            result = Local().run(job)
        except Interrupted:  # the error's message is about a job, not the plan
            raise KeyboardInterrupt from None
    if caught or result["outcome"] == Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return terms_of(result, candidate, request.batch_size)


@contextlib.contextmanager
def only_plan() -> Iterator[None]:
    """Hold the machine's lock for plans: two at once would disturb each other's measurements."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(LOCK)
        except OSError:
            raise UsageError(
                "another plan measures on this machine, and two would disturb each other: wait for its end"
            ) from None
        yield


def busy() -> float:
    """Return the ratio of wall time to computing time of the cores: 1 if nothing else runs."""

    def spin(_: int) -> float:
        wall, mine = time.perf_counter(), time.thread_time()
        while time.perf_counter() < wall + SPIN_SECONDS:
            hashlib.sha256(BLOCK).digest()  # releases the interpreter's lock
        return (time.perf_counter() - wall) / max(1e-9, time.thread_time() - mine)

    with ThreadPoolExecutor(cores()) as pool:
        return statistics.fmean(pool.map(spin, range(cores())))
