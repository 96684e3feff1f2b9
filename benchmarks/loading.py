"""Cost of data transforms that a loader runs ahead of the step."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.parts import loading as script
from benchmarks.parts.timing import BenchOptions, Measured, Table, figure, interleave, rate_rows, rates, ratio
from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour

SHARE = 0.97
"""Least samples per second with transforms loaded ahead, relative to those without."""


@dataclass(frozen=True)
class LoadingOptions(BenchOptions):
    """Options of the benchmark loading."""

    milliseconds: float = 5.0
    """Milliseconds of transforms in a minibatch of 64."""
    epochs: int = 2
    """Passes over 12,800 images in a turn."""
    repeats: int = 5
    """Rounds."""


def run(options: LoadingOptions) -> Measured:
    """Measure."""
    seconds = options.milliseconds / 1000
    turns = {
        "no transforms, tensors in memory": partial(_rate, options.epochs, 0.0, "held"),
        "no transforms": partial(_rate, options.epochs, 0.0, "1"),
        "transforms, loaded ahead": partial(_rate, options.epochs, seconds, "1"),
        "transforms, between steps": partial(_rate, options.epochs, seconds, "0"),
    }
    taken = interleave(turns, options.repeats)
    held, none, ahead, between = taken.values()
    shares = {"ahead": ratio(ahead, none), "between": ratio(between, none), "ahead_of_held": ratio(ahead, held)}
    fields = {"milliseconds": options.milliseconds, "epochs": options.epochs, "repeats": options.repeats}
    result: Json = {**fields, **rates(taken), "of_none": shares}
    what = "samples per second with transforms loaded ahead, relative to none"
    title = f"LeNet, one replica, {options.milliseconds:g} ms of transforms"
    return Measured(
        result,
        [figure(what, shares["ahead"], SHARE)],
        [Table(title, ("", "samples/s", "+-"), rate_rows(result))],
    )


def _rate(epochs: int, seconds: float, workers: str) -> float:
    """Return the samples per second of one replica."""
    with tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        strategy = Downpour(replicas=1, shards=1)
        job = Job(task="loading", strategy=strategy, epochs=epochs, checkpoint_every=0, out=f"{folder}/run")
        result = Local().launch(job, [str(Path(script.__file__)), str(seconds), workers])
        return float(result["samples_per_second"])
