"""The command `study`: ways to train, compared by rules that are fixed beforehand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distbelief.cli import options, teller
from distbelief.cli.arguments import DataFolder, Quiet, ask_of
from distbelief.cli.results import parse_compression
from distbelief.core.settings import at_least
from distbelief.errors import UsageError
from distbelief.lab.study import definition
from distbelief.lab.study.definition import Arm, Study
from distbelief.places import signals
from distbelief.places.processes import forkserver
from distbelief.references import check_task

if TYPE_CHECKING:
    from distbelief.job import Job
    from distbelief.lab.study.running import Prepare, Prepared
    from distbelief.places.processes.local import Local
    from distbelief.places.simulated.simulated import Simulated

KEPT = (
    "--out",
    "--resume",
    "--seed",
    "--target-accuracy",
    "--target-loss",
    "--keep-checkpoints",
    "--keep",
    "--sweep",
    "--phantom",
    "--json",
    "--quiet",
    "--page",
)
"""Options that a study sets itself, for all of its arms."""
COMMANDS = {"local": "train", "simulated": "simulate"}
"""Command that runs an arm alone, by the arm's place."""


@dataclass(frozen=True)
class StudyOptions(Quiet, DataFolder):
    """Run a study of the package, or one in a TOML file. Its trials run one after the other and take hours; after an
    interruption the same command continues.
    """

    out: str = ""
    """Folder of the study; the default is studies/NAME."""
    minutes: float = float("inf")
    """Start no trial after this many minutes; the same command continues the study."""
    seeds: int = 0
    """Number of seeds, counted from the study's first one; 0 takes the study's own seeds."""
    replicas: tuple[int, ...] = ()
    """Numbers of replicas to compare, instead of the study's."""


def study(args: list[str]) -> int:
    """Run `distbelief study NAME|FILE.toml [options]`."""
    names = ", ".join(definition.names())
    known, meaning = f"the package's own: {names}", f"{StudyOptions.__doc__} Studies: {names}"
    name, settings = ask_of("distbelief study NAME|FILE.toml", "study", StudyOptions, args, meaning, known)
    file = definition.find(name)
    at_least(settings, 0, ("seeds",), {})
    read = definition.read(file, settings.seeds, settings.replicas)
    more = ("--data-dir", settings.data_dir) if settings.data_dir else ()
    check(read, file, more)
    out = Path(settings.out or f"studies/{file.stem}")
    forkserver.start()
    from distbelief.lab.study.report import PAGE, write_page, write_report
    from distbelief.lab.study.running import run

    tell = teller(settings.quiet)
    tell(f"{read.title}: {len(read.arms)} arms, {len(read.seeds)} seeds, into {out}")
    with signals.raised():
        trials = run(read, out, preparing(more), tell, settings.minutes)
        report = write_report(out, read, trials)
        if not settings.quiet:
            print("\n".join(report.lines()))
        write_page(out / PAGE, report)
    return 0


def preparing(more: Sequence[str] = ()) -> Prepare:
    """Return a function that prepares the job of an arm, with `more` words for all arms."""

    def prepare(arm: Arm, words: Sequence[str]) -> Prepared:
        from distbelief.lab.study.running import Prepared

        if arm.compresses:
            from distbelief.lab.compress.compressing import compress

            chosen = parse_compression([*words, *more])
            command = shlex.join(["distbelief", "compress", "RUN", *words])
            return Prepared(lambda run, out: compress(run, out, chosen), command)
        place, job = _place_and_job(arm, [*words, *more])
        return Prepared(place.run, shlex.join(["distbelief", COMMANDS[arm.place], arm.task, arm.strategy, *words]), job)

    return prepare


def _place_and_job(arm: Arm, words: Sequence[str]) -> tuple[Local | Simulated, Job]:
    parsed = options.parse(COMMANDS[arm.place], arm.task, arm.strategy, words)
    return parsed.place() if arm.place == "local" else parsed.simulated(), parsed.job(arm.task)


def check(read: Study, file: Path, more: Sequence[str] = ()) -> None:
    """Refuse wrong options of any arm, naming the file and the arm, before anything runs."""
    for arm in (*read.arms, *read.starts):
        words = arm.with_value(arm.grid[0] if arm.grid else None)
        with definition.at(file), definition.at(f"arm {arm.name!r}"):
            check_task(arm.task)
            kept = ("--seed",) if arm.compresses else KEPT
            if reserved := next((word for word in words if word in kept), ""):
                raise UsageError(f"{reserved}: the study sets it itself; leave it off")
            if arm.compresses:
                parse_compression([*words, *more])
                continue
            place, job = _place_and_job(arm, [*words, *more])
            place.settings(job)
