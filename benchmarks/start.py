"""Seconds from the start of a job, in a fresh Python, to its first step."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from benchmarks.parts.timing import BenchOptions, Measured, Table, figure, interleave, ratio, spread
from distbelief.errors import JobFailed
from distbelief.lab import number

TIMES = 2.5
"""Target: time to the first step, relative to Python's import of torch."""
PATIENCE = 120.0
"""Time limit of one job in seconds."""


@dataclass(frozen=True)
class StartOptions(BenchOptions):
    """Options of the benchmark start."""

    task: str = "mnist"
    """Task to train."""
    replicas: int = 2
    """Replicas of the job."""
    shards: int = 2
    """Shards of the job."""
    repeats: int = 5
    """Number of starts."""


def run(options: StartOptions) -> Measured:
    """Measure."""
    starts: list[dict[str, float]] = []

    def start() -> float:
        starts.append(_start(options))
        return starts[-1]["first_step"]

    taken = interleave({"start": start, "torch": _import_torch}, options.repeats)
    medians = {key: statistics.median(one[key] for one in starts) for key in starts[0]}
    medians["torch imported"] = statistics.median(taken["torch"])
    job = {"task": options.task, "replicas": options.replicas, "shards": options.shards}
    title = f"{options.task}: {options.replicas} replicas, {options.shards} shards"
    rows = [[key.replace("_", " "), number(value)] for key, value in medians.items()]
    what, times = "seconds to the first step, relative to importing torch", ratio(taken["start"], taken["torch"])
    return Measured(
        {**job, "seconds": medians, "spread": spread(taken["start"]), "runs": starts},
        [figure(what, times, TIMES, lower=True)],
        [Table(title, ("seconds after the command was started", "median"), rows)],
    )


def _import_torch() -> float:
    """Measure the seconds that a fresh Python needs to import torch and end."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=PATIENCE)
    return time.monotonic() - began


def _start(options: StartOptions) -> dict[str, float]:
    """Measure the seconds to a job's first dealt minibatch, to its first applied step, and to its end."""
    moments: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        command = [sys.executable, "-m", "distbelief", "train", options.task, "downpour", "--json"]
        command += ["--replicas", str(options.replicas), "--out", f"{folder}/run", "--shards", str(options.shards)]
        command += ["--epochs", "1", "--evaluate-every", "0"]
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                record, now = json.loads(line), time.monotonic() - began
                if record.get("event") == "Started":
                    moments.setdefault("first_minibatch_dealt", now)
                elif record.get("event") == "Stepped" and record["steps"]:
                    moments.setdefault("first_step", now)
    if process.returncode or "first_step" not in moments:
        raise JobFailed(f"{' '.join(command)} ended with status {process.returncode} before its first step")
    return {**moments, "end": time.monotonic() - began}
