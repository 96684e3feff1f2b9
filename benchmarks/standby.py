"""Cost of standbys, and the time until one succeeds its killed shard."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from benchmarks.parts import workloads
from benchmarks.parts.timing import BenchOptions, Measured, Table, figure, interleave, rates, ratio
from distbelief.core.optimizer import optim
from distbelief.errors import JobFailed
from distbelief.lab import number
from distbelief.places.status import status
from distbelief.strategies import Downpour

ANEW, SHARE = 0.33, 0.85
"""Targets: the time of a succession over that of a restart, and samples per second with standbys over without."""
PATIENCE = 120.0
"""Time limit of one job in seconds."""
ENDLESS = 1_000_000


@dataclass(frozen=True)
class StandbyOptions(BenchOptions):
    """Options of the benchmark standby."""

    task: str = "benchmarks.parts.workloads:lenet_short"
    """Task to train with and without standbys."""
    replicas: int = 2
    """Replicas of every job."""
    shards: int = 2
    """Shards of every job."""
    repeats: int = 5
    """Rounds of the two jobs, and number of killed shards."""


def run(options: StandbyOptions) -> Measured:
    """Measure."""
    plain = Downpour(options.replicas, options.shards, optim("adagrad", lr=0.01))
    rate = partial(workloads.rate, options.task)
    turns = {"without": partial(rate, plain), "with": partial(rate, dataclasses.replace(plain, standby=1))}
    taken = interleave(turns, options.repeats)
    took = [_take_over(options) for _ in range(options.repeats)]
    anew, forgotten = statistics.median(one["of_start"] for one in took), sum(one["forgotten"] for one in took)
    share = ratio(taken["with"], taken["without"])
    rated = rates(taken)
    rows = [[f"samples/s {name} standbys", number(value)] for name, value in rated["samples_per_second"].items()]
    rows += [["seconds to take over", ", ".join(number(one["seconds"]) for one in took)]]
    job = {"task": options.task, "replicas": options.replicas, "shards": options.shards, "repeats": options.repeats}
    again = "seconds from a shard's death to the next step everywhere, relative to those to the first step"
    return Measured(
        {**job, **rated, "with_of_without": share, "take_overs": took},
        [
            figure("samples per second with standbys, relative to none", share, SHARE),
            figure(again, anew, ANEW, lower=True),
            figure("acknowledged pushes that were lost", forgotten, 0, lower=True),
        ],
        [Table(f"{options.task}: {options.replicas} replicas, {options.shards} shards", ("", ""), rows)],
    )


def _take_over(options: StandbyOptions) -> dict[str, float]:
    """Train a million parameters, kill a shard, and measure when the next step is applied everywhere."""
    with tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "distbelief", "train", "benchmarks.parts.workloads:million", "downpour"]
        command += ["--standby", "1", "--json", "--replicas", str(options.replicas), "--shards", str(options.shards)]
        command += ["--batch-size", "8", "--lr", "0", "--out", str(run)]
        command += ["--epochs", str(ENDLESS), "--evaluate-every", "0", "--checkpoint-every", "0"]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        try:
            seconds, start = _watch(process.stdout, run, options.shards, began)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
        forgotten = json.loads((run / "result.json").read_text())["forgotten"]
        return {"seconds": seconds, "start": start, "of_start": seconds / start, "forgotten": forgotten}


def _watch(lines: IO[str], run: Path, shards: int, began: float) -> tuple[float, float]:
    """Kill shard 0 once all standbys are ready; return the seconds to the next applied step, and to the first one."""
    ready, killed, first, succeeded, give_up = 0, 0.0, 0.0, False, time.monotonic() + PATIENCE
    for line in lines:
        now, record = time.monotonic(), json.loads(line)
        if now > give_up:
            break
        ready += record.get("event") == "StandbyReady"
        succeeded |= record.get("event") == "Succeeded"
        if record.get("event") == "Stepped" and record["steps"]:
            first = first or now - began
            if succeeded:
                return now - killed, first
        if ready == shards and not killed:
            [pid] = [one["pid"] for one in status(run)["members"] if one["role"] == "shard 0"]
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
    raise JobFailed(f"no standby took over within {PATIENCE:.0f} s; is the machine overloaded?")
