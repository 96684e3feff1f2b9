"""The commands that read what runs have left: `report`, `runs`, `evaluate`, `predict`, `compress` and `expand`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from distbelief.cli import teller
from distbelief.cli.arguments import DataFolder, Quiet, ask, ask_after, ask_maybe, ask_of, picked
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.job import OnDevice, Threaded
from distbelief.lab import number
from distbelief.lab.compress.options import Compression
from distbelief.places import signals
from distbelief.places.processes import forkserver
from distbelief.record.folder import check_output
from distbelief.references import check_task
from distbelief.split.options import AUTO


@dataclass(frozen=True)
class ReportOptions:
    """Compare runs on one page, or write the page of a study again from its folder."""

    out: str = "report.html"
    """File of the page; a study keeps its page in its folder."""
    targets: tuple[str, ...] = ()
    """Targets whose times are compared: test accuracies (0.97) or losses (loss=0.1, training-loss=0.1). A study has
    its own."""


def report(args: list[str]) -> int:
    """Run `distbelief report RUN RUN ... [options]`."""
    prog = "distbelief report RUN ..."
    named, settings = ask_after(prog, ReportOptions, args)
    if not named:
        raise UsageError(f"which runs? Write their folders, or that of a study: {prog}")
    from distbelief.lab.study.definition import Study
    from distbelief.lab.study.figures import Report
    from distbelief.lab.study.report import PAGE, make_report, write_page, write_report
    from distbelief.lab.study.running import STUDY, kept_trials, read_kept
    from distbelief.lab.study.runs import study_of

    first = Path(named[0])
    if (first / STUDY).is_file():
        if len(named) > 1:
            raise UsageError(f"{first} is the folder of a study, which has a report of its own: name it alone")
        if settings != ReportOptions():
            raise UsageError(
                f"--out, --targets: {first} is a study, which has its own page and targets; leave them off"
            )
        report: Report = write_report(first, read_kept(first / STUDY, Study), kept_trials(first))
        page = first / PAGE
    else:
        page = Path(settings.out)
        check_output(page)
        report = make_report(*study_of([Path(name) for name in named], settings.targets), {}, left=0)
    print("\n".join(report.lines()))
    write_page(page, report)
    print(page)
    return 0


@dataclass(frozen=True)
class RunsOptions:
    """List the runs in a folder: task, strategy, state, accuracy, time."""

    sort: str = "run"
    """Column to sort by: run, task, strategy, state, accuracy (the best first), seconds or seed."""
    task: str = ""
    """Show only runs of this task."""
    strategy: str = ""
    """Show only runs of this strategy."""
    state: str = ""
    """Show only runs in this state: done, target, interrupted, failed, left, running, cut short or spoilt."""
    json: bool = False
    """Show runs as lines of JSON."""


def runs(args: list[str]) -> int:
    """Run `distbelief runs [DIR] [options]`."""
    folder, settings = ask_maybe("distbelief runs [DIR]", RunsOptions, args)
    from distbelief.lab.study.figures import percent
    from distbelief.lab.study.runs import COLUMNS, choose, list_runs

    kept = {"task": settings.task, "strategy": settings.strategy, "state": settings.state}
    listed = choose(list_runs(Path(folder or "runs")), kept, settings.sort)
    if settings.json:
        for run in listed:
            print(msgspec.json.encode(run).decode())
        return 0
    accuracies = ["" if run.accuracy is None else percent(run.accuracy) for run in listed]
    rows = [
        [run.run, run.task, run.strategy, run.state, accuracy, number(run.seconds), str(run.seed)]
        for run, accuracy in zip(listed, accuracies, strict=True)
    ]
    widths = [max(len(row[at]) for row in [COLUMNS, *rows]) for at in range(len(COLUMNS))]
    for row in [COLUMNS, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


@dataclass(frozen=True)
class PredictOptions(Quiet, Threaded, DataFolder):
    """Write the outputs of the model of a run, or the mean of several, for the test set of a task or for the inputs in
    a file (.safetensors with a tensor "inputs", or .npy). The result is a safetensors file with a tensor "outputs".
    """

    out: str = ""
    """File to write, such as outputs.safetensors."""
    replicas: int = 2
    """Processes that compute, each with the models of all runs; with --partitions, groups of processes."""
    partitions: int = 1
    """Processes of each replica, each with its part of every model."""
    split: str = AUTO
    """How partitions split a model: one way, or PATTERN=WAY,... by names of modules, where a number is a partition;
    auto takes the way with the lowest price."""
    batch_size: int = 1000
    """Samples computed at once."""
    json: bool = False
    """Show the figures as JSON."""


PROG = "distbelief predict RUN... TASK|FILE"


def predict(args: list[str]) -> int:
    """Run `distbelief predict RUN... TASK|FILE --out FILE [options]`."""
    words, settings = ask_after(PROG, PredictOptions, args)
    if len(words) < 2:
        raise UsageError(f"write the runs and what to predict first: {PROG} --out FILE")
    *runs, source = words
    if not source.endswith((".safetensors", ".npy")):
        check_task(source)
    if not settings.out:
        raise UsageError(f"where to? Name the file: {PROG} --out outputs.safetensors")
    forkserver.start(settings.partitions > 1)
    from distbelief.cli import tables
    from distbelief.places.prediction import predict as predicting
    from distbelief.record.live import figures

    with signals.raised(), tables.progress(f"predicting {source}") as show:
        given = picked(settings, "replicas", "batch_size", "data_dir", "device", "threads", "partitions", "split")
        result = predicting.predict(runs, source, settings.out, told=show, **given)
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


@dataclass(frozen=True)
class CompressOptions(Quiet, Compression):
    """Make the model of a run smaller: prune it (--keep), let its weights share a few values (--bits), code the rest
    (--huffman), and train it between these steps. The reported ratio counts every byte of the file.
    """

    out: str = "model.dbz"
    """File to write."""
    json: bool = False
    """Show the result as JSON."""


def compress(args: list[str]) -> int:
    """Run `distbelief compress RUN [options]`."""
    run, settings = ask_of("distbelief compress RUN", "run", CompressOptions, args)
    forkserver.start()
    from distbelief.lab.compress.compressing import compress as make

    with signals.raised():
        chosen = Compression(**picked(settings, *(field.name for field in fields(Compression))))
        result = make(run, settings.out, chosen, tell=teller(settings.quiet or settings.json))
    if settings.json:
        print(msgspec.json.encode(result).decode())
    elif not settings.quiet:
        print("\n".join(summary(result)))
    return 0


def parse_compression(words: Sequence[str]) -> Compression:
    """Read options of `compress` that describe the compression, without those of its output."""
    return ask("distbelief compress RUN", Compression, words)


def summary(result: Json) -> list[str]:
    """Describe a compression, in lines."""
    lines = [f"{'layer':20} {'values':>11} {'kept':>7} {'bits':>5} {'bytes':>11} {'of them gaps':>13}"]
    for layer in result["layers"]:
        size = layer["gap_bytes"] + layer["value_bytes"]
        kept = 100 * layer["kept"] / layer["values"]
        lines.append(
            f"{layer['name']:20} {layer['values']:>11,} {kept:>5.1f} % {layer['bits'] or 32:>5} {size:>11,} "
            f"{layer['gap_bytes']:>13,}"
        )
    lines += [f"{name} shares nothing: {why}" for name, why in result["left_alone"].items()]
    sizes = f"{result['bytes']:,} bytes of {result['dense_bytes']:,}"
    lines.append(f"{result['file']}: {sizes}, {result['ratio']:.1f} times fewer")
    if "test_error" in result:
        lines.append(f"test error {result['test_error']:.2f} %, before compression {result['dense_error']:.2f} %")
    return lines


@dataclass(frozen=True)
class ExpandOptions:
    """Write the model of a compressed file as a safetensors file, which plain PyTorch loads."""

    out: str = ""
    """File to write; the default is the name of the compressed file with the ending .safetensors."""


def expand(args: list[str]) -> int:
    """Run `distbelief expand FILE [options]`."""
    file, settings = ask_of("distbelief expand FILE", "file", ExpandOptions, args)
    from distbelief.lab.compress.compressing import expand as write

    print(write(file, settings.out or None))
    return 0


@dataclass(frozen=True)
class EvaluateOptions(OnDevice, DataFolder):
    """Measure the model of a run folder, or of a compressed file, on its task's test set."""

    data_dir: str | None = None
    """Folder of the data. The default is the run's, then $DISTBELIEF_DATA, then the cache."""
    task: str = ""
    """Task of a compressed file as module:function, if it is not built in."""
    inference: str = "float32"
    """Arithmetic: float32; int8 (products of 8 bits); or, for a compressed file, ids (shared weights are looked up by
    their ids whenever they are used)."""
    json: bool = False
    """Show the figures as JSON."""


def evaluate(args: list[str]) -> int:
    """Run `distbelief evaluate RUN|FILE [options]`."""
    run, settings = ask_of("distbelief evaluate RUN", "run folder", EvaluateOptions, args)
    from distbelief.places.evaluate import evaluate as measure
    from distbelief.record.live import figures

    result = measure(run, settings.data_dir, settings.device, settings.task or None, settings.inference)
    if settings.json:
        print(msgspec.json.encode(result).decode())
    else:
        text = figures(result["test_accuracy"], result["test_metrics"], result["test_loss"])
        print(f"{result['task']}: test {text} ({result['samples']:,} samples)")
        if settings.inference != "float32":
            print(f"{settings.inference}: {result['model_bytes']:,} bytes in memory, {result['seconds']:.2f} s")
    return 0
