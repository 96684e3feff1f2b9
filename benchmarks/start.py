"""Seconds from starting a job, in a fresh Python, to its first step."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.parts.timing import BenchOptions, figure, finish, interleave, ratio, spread
from distbelief.cli.tables import number, show
from distbelief.core.records import Json
from distbelief.errors import JobFailed
from distbelief.record.machine import machine

TIMES = 2.5
"""The figure to reach: the first step, in the time that Python takes here to import torch."""
PATIENCE = 120.0
"""Longest wait for one job."""


@dataclass(frozen=True)
class StartOptions(BenchOptions):
    """Options of the benchmark start."""

    task: str = "mnist"
    """What is trained."""
    replicas: int = 2
    """Replicas of the job."""
    shards: int = 2
    """Its shards."""
    repeats: int = 5
    """Times a job is started."""
    QUICK: ClassVar[Mapping[str, object]] = {"task": "digits", "repeats": 1}
    """Defaults with --quick."""


def run(options: StartOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        JobFailed: a job did not train.
    """
    facts, starts = machine(), []

    def start() -> float:
        starts.append(_start(options))
        return float(starts[-1]["first_step"])

    taken = interleave({"start": start, "torch": _import_torch}, options.repeats)
    medians = {key: statistics.median(one[key] for one in starts) for key in starts[0]}
    medians["torch imported"] = statistics.median(taken["torch"])
    result: Json = {
        "bench": "start",
        "machine": facts,
        "task": options.task,
        "replicas": options.replicas,
        "shards": options.shards,
        "seconds": medians,
        "spread": spread(taken["start"]),
        "runs": starts,
        "figures": [],
    }
    if not options.quick and (options.replicas, options.shards) == (2, 2):
        result["figures"].append(
            figure(
                "start of the command to the first step, of importing torch",
                ratio(taken["start"], taken["torch"]),
                TIMES,
                lower=True,
            )
        )
    if not options.quiet:
        rows = [[key.replace("_", " "), number(value)] for key, value in medians.items()]
        show(
            f"{options.task}: {options.replicas} replicas, {options.shards} shards",
            ("seconds after the command was started", "median"),
            rows,
        )
    return finish(result, options)


def _import_torch() -> float:
    """Seconds in which a fresh Python imports torch and ends."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=PATIENCE)
    return time.monotonic() - began


def _start(options: StartOptions) -> dict[str, float]:
    """Seconds until the job's first minibatches were dealt, until its first steps were reported as applied, and until
    it ended.
    """
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
