"""Seconds from starting a job, in a fresh Python, to its first step."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
    """Run the command, and watch its metrics for what happens when."""
    with tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "distbelief", "train", options.task, "downpour"]
        command += ["--replicas", str(options.replicas), "--out", str(out), "--shards", str(options.shards)]
        command += ["--epochs", "1", "--evaluate-every", "0", "--quiet"]
        began = time.monotonic()
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            try:
                moments = _watch(process, out / "metrics.jsonl", began)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    _end(process)
            if process.returncode or "first_step" not in moments:
                errors.seek(0)
                raise JobFailed(
                    f"{' '.join(command)} ended with status {process.returncode} before its first step: "
                    f"{errors.read()[-1000:]}"
                )
    return moments


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that was interrupted; kill it where it does not end."""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _watch(process: subprocess.Popen[bytes], metrics: Path, began: float) -> dict[str, float]:
    """Seconds until the job's first minibatches were dealt, until its first steps were reported as applied, and until
    it ended.
    """
    moments: dict[str, float] = {}
    while process.poll() is None:
        now = time.monotonic() - began
        if now > PATIENCE:
            raise JobFailed(f"the job did not end within {PATIENCE:.0f} s; is the machine overloaded?")
        if len(moments) < 2 and metrics.exists():
            for line in metrics.read_text().splitlines(keepends=True):
                record = json.loads(line) if line.endswith("\n") else {}
                if record.get("event") == "Started":
                    moments.setdefault("first_minibatch_dealt", now)
                elif record.get("event") == "Stepped" and record["steps"]:
                    moments.setdefault("first_step", now)
        time.sleep(0.005)
    return {**moments, "end": time.monotonic() - began}
