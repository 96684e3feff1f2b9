"""Table of several runs of benchmarks at different times, with medians and ranges; docs/bench.md is made from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from benchmarks.parts.timing import Figure, figure, figure_row
from distbelief.errors import UsageError
from distbelief.lab import number


class MachineFacts(msgspec.Struct, frozen=True):
    """Machine and time of a run."""

    cores: int
    processor: str
    torch: str
    date: str


class BenchRun(msgspec.Struct, frozen=True):
    """Contents of a file that `--json` has written."""

    bench: str
    machine: MachineFacts
    figures: list[Figure]
    options: dict[str, object] = {}


def table(paths: Sequence[str]) -> str:
    """Return the runs in these files as Markdown: a heading for each benchmark, and a row for each of its figures."""
    if not paths:
        raise UsageError(
            "table needs the files that --json has written, such as: python -m benchmarks table first.json second.json"
        )
    runs = [_read(path) for path in paths]
    return "\n\n".join(
        _of_bench(name, [run for run in runs if run.bench == name]) for name in dict.fromkeys(run.bench for run in runs)
    )


def _read(path: str) -> BenchRun:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=BenchRun)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not what a benchmark's --json has written ({error}); name such files") from error


def _of_bench(name: str, runs: Sequence[BenchRun]) -> str:
    options = {
        " ".join(f"--{key.replace('_', '-')} {_words(value)}" for key, value in run.options.items()) for run in runs
    }
    if len(options) > 1:
        raise UsageError(
            f"runs of {name} with other options cannot be one figure: "
            f"{'; '.join(sorted(one or 'none' for one in options))}"
        )
    machines = {f"{run.machine.cores} cores, {run.machine.processor}, torch {run.machine.torch}" for run in runs}
    when = ", ".join(run.machine.date[:16].replace("T", " ") for run in sorted(runs, key=lambda run: run.machine.date))
    command = f"python -m benchmarks {name} {options.pop()}".strip()
    head = (
        f"`{command}`, runs of {when}; {'; '.join(sorted(machines))}\n\n| what | promised | median | least to most | "
        "|\n|---|---|---|---|---|"
    )
    whats = dict.fromkeys(one["what"] for run in runs for one in run.figures)
    rows = [_row([f for run in runs for f in run.figures if f["what"] == what], len(runs)) for what in whats]
    return "\n".join([head, *rows])


def _row(figures: Sequence[Figure], runs: int) -> str:
    """Make a row of the table.

    >>> _row([figure("rate", rate, 2.0) for rate in (1.0, 3.0, 2.0)], 3)
    '| rate | >= 2 | 2 | 1 to 3 | reached |'
    """
    first, measured = figures[0], [one["measured"] for one in figures]
    middle = figure(first["what"], statistics.median(measured), first["promised"], first["better"] == "lower")
    few = f" ({len(figures)} runs)" if len(figures) < runs else ""
    spread = f"{number(min(measured))} to {number(max(measured))}{few}" if len(measured) > 1 else "one run"
    what, median, promise, reached = figure_row(middle)
    return f"| {what} | {promise} | {median} | {spread} | {reached.lower()} |"


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
