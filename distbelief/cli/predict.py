"""The command `predict`: what trained models answer to samples, in one file."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from distbelief.cli.arguments import DataFolder, ask_after
from distbelief.errors import UsageError
from distbelief.job import Threaded
from distbelief.places import signals
from distbelief.places.processes import forkserver
from distbelief.references import check_task
from distbelief.split.options import AUTO


@dataclass(frozen=True)
class PredictOptions(Threaded, DataFolder):
    """Answers of the model of a run, or of the mean of several, to the test set of a task, or to the inputs in
    a file (.safetensors with a tensor "inputs", or .npy): a tensor "outputs" in a safetensors file, samples in order.
    """

    out: str = ""
    """The file to write, such as outputs.safetensors."""
    replicas: int = 2
    """Processes that compute, each with the models of all runs; or, of several partitions each, groups of processes."""
    partitions: int = 1
    """Processes of each replica, each with its own part of every model."""
    split: str = AUTO
    """Split, where these are several: one way, or PATTERN=WAY,... of modules' names, where a number is a partition;
    auto takes that with the least price.
    """
    batch_size: int = 1000
    """Samples that are computed at once."""
    quiet: bool = False
    """Show nothing but errors."""
    json: bool = False
    """Show the figures as JSON."""


PROG = "distbelief predict RUN... TASK|FILE"


def predict(args: list[str]) -> int:
    """`distbelief predict RUN... TASK|FILE --out FILE [options]`."""
    words, settings = ask_after(PROG, PredictOptions, args)
    if len(words) < 2:
        raise UsageError(f"write which runs, and what they are to predict, first: {PROG} --out FILE")
    *runs, source = words
    if not source.endswith((".safetensors", ".npy")):
        check_task(source)
    if not settings.out:
        raise UsageError(f"where to? Name the file: {PROG} --out outputs.safetensors")
    forkserver.start(settings.partitions > 1)
    from distbelief.cli import cost_tables
    from distbelief.places.prediction import predict as predicting
    from distbelief.record.live import figures

    with signals.raised(), cost_tables.progress(f"predicting {source}") as show:
        result = predicting.predict(
            runs,
            source,
            settings.out,
            settings.replicas,
            settings.batch_size,
            settings.data_dir,
            settings.device,
            settings.threads,
            settings.partitions,
            settings.split,
            show,
        )
    if settings.json:
        print(msgspec.json.encode(result).decode())
    elif not settings.quiet:
        measured = ""
        if "test_loss" in result:
            shown = figures(result["test_accuracy"], result["test_metrics"], result["test_loss"])
            measured = f"; test {shown}"
        done = f"{result['samples']:,} samples, {result['samples_per_second']:,.0f} a second"
        print(f"{result['out']}: outputs of {done}{measured}")
    return 0
