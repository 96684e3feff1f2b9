"""The commands `report` and `runs`: what run folders hold, beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from distbelief.cli.arguments import ask_after
from distbelief.errors import UsageError


@dataclass(frozen=True)
class ReportOptions:
    """Put runs beside each other, on one page; or make that of a study again, of its folder."""

    out: str = "report.html"
    """The page; of a study, it lies in its folder."""
    targets: tuple[str, ...] = ()
    """Test accuracies (0.97) or losses (loss=0.1, training-loss=0.1) to which the times are compared; a study has its
    own.
    """


def report(args: list[str]) -> int:
    """`distbelief report RUN RUN ... [options]`."""
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
            raise UsageError(f"{first} is the folder of a study, which is a report of its own: name it alone")
        if settings != ReportOptions():
            raise UsageError(
                f"--out and --targets are of runs, and {first} is a study, which has its own: leave them off"
            )
        report: Report = write_report(first, read_kept(first / STUDY, Study), kept_trials(first))
        page = first / PAGE
    else:
        report = make_report(*study_of([Path(name) for name in named], settings.targets), {}, left=0)
        page = Path(settings.out)
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
    """Only those of a task."""
    strategy: str = ""
    """Only those of a strategy."""
    state: str = ""
    """Only those that are so: done, target, interrupted, failed, left, running, cut short or spoilt."""
    json: bool = False
    """Show them as lines of JSON."""


def runs(args: list[str]) -> int:
    """`distbelief runs [DIR] [options]`."""
    prog = "distbelief runs [DIR]"
    named, settings = ask_after(prog, RunsOptions, args)
    if len(named) > 1:
        raise UsageError(f"{named[1]!r} is one word too many: name one folder, {prog}")
    from distbelief.lab.study.figures import number, percent
    from distbelief.lab.study.runs import COLUMNS, choose, list_runs

    kept = {"task": settings.task, "strategy": settings.strategy, "state": settings.state}
    listed = choose(list_runs(Path(named[0] if named else "runs")), kept, settings.sort)
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
