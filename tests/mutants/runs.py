"""Runs of the tests of mutants, each in a copy of its own, some at a time, and what each comes to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mutants import Mutant, watch
from mutants.copies import copied, end_processes, mutate, python

LEAST_SECONDS, TIMES = 30.0, 10.0
"""A run may take so much, and so many times as long as is said of it; then it hangs."""
_TICK = 0.05


class Verdict(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    HUNG = "hung"
    BROKEN = "broken"
    """The change breaks more than it should, or a test fails without it: this says nothing about the tests."""
    SKIPPED = "skipped"
    """A test that it names cannot run here."""


@dataclass(frozen=True)
class Outcome:
    """A mutant's verdict, and the reason in one line."""

    mutant: Mutant
    verdict: Verdict
    why: str
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the tests have noticed it, or could not be asked."""
        return self.verdict in (Verdict.KILLED, Verdict.SKIPPED) or (self.verdict is Verdict.HUNG and self.mutant.hangs)


@dataclass
class Run:
    """Pytest in a copy: of the code as it is, or with one mutant."""

    root: Path
    folder: Path
    tests: Sequence[str]
    limit: float
    mutant: Mutant | None = None
    hung: bool = False
    started: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)

    def start(self) -> None:
        """Begin."""
        self.started = time.monotonic()
        copy = copied(self.root, self.folder)
        interpreter = python(copy)
        modules = ["distbelief"]
        if self.mutant:
            mutate(copy, self.mutant)
            modules.append(
                os.path.normpath(f"distbelief/{self.mutant.file}")
                .removesuffix(".py")
                .removesuffix("/__init__")
                .replace("/", ".")
            )
        stop_early = list(self.tests) if self.mutant else []
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {watch.COPY: str(copy), watch.REPORT: str(self.report), "TMPDIR": str(self.folder / "tmp")}
        environment["DISTBELIEF_SEEDS"] = "50"  # as in `make test`
        environment |= {watch.MODULES: json.dumps(modules), watch.NAMED: json.dumps(stop_early)}
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [interpreter, "-m", "pytest", "-p", "mutants.watch", "-p", "no:cacheprovider", *self.tests],
                cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def report(self) -> Path:
        """Where the plugin writes."""
        return self.folder / "report"

    def over(self) -> bool:
        """Whether it has ended, or had to be."""
        self.seconds = time.monotonic() - self.started
        self.hung = self.seconds > self.limit
        return self.hung or self.process.poll() is not None

    def end(self) -> None:
        """Kill what is left of it and take its copy away; the report stays."""
        self.process.kill()
        self.process.wait()
        end_processes(self.folder)
        for name in ("project", "python", "tmp"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the plugin wrote of a kind."""
        lines = self.report.read_text().splitlines() if self.report.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def wrong(self) -> str:
        """Why this run says nothing of the tests; empty where it does."""
        if broken := self.events("broken"):
            return str(broken[0]["why"])
        ends = self.events("end")
        if ends and ends[0]["strange"]:
            return f"the tests imported {ends[0]['strange'][0]}, which is not of the copy"
        if not ends and not self.hung:
            return (
                f"pytest ended with status {self.process.returncode}: "
                f"{(self.folder / 'output').read_text(errors='replace')[-400:]}"
            )
        return ""

    def outcomes(self, named: str) -> list[dict[str, Any]]:
        """How a test ended, or its cases; what is torn down badly has failed too."""
        return [event for event in self.events("test") if watch.covers(named, event["test"])]


@contextlib.contextmanager
def one(run: Run) -> Iterator[Run]:
    """A run that has begun, and ends with this context."""
    run.folder.mkdir(parents=True)
    run.start()
    try:
        yield run
    finally:
        run.end()


def play(
    runs: Sequence[Run], at_once: int, done: Callable[[Run], None], go_on: Callable[[], bool] = lambda: True
) -> None:
    """Play runs, so many at once; `done` is told of each; none is begun once `go_on` says no."""
    waiting, going = list(runs), contextlib.ExitStack()
    with going:
        active: dict[int, tuple[Run, contextlib.ExitStack]] = {}
        while waiting or active:
            if waiting and not go_on():
                waiting.clear()
            while waiting and len(active) < at_once:
                run, stack = waiting.pop(0), contextlib.ExitStack()
                going.push(stack)
                stack.enter_context(one(run))
                active[id(run)] = (run, stack)
            for run, stack in [pair for pair in active.values() if pair[0].over()]:
                del active[id(run)]
                stack.close()
                done(run)
            time.sleep(_TICK)


def judged(run: Run) -> Outcome:
    """What a run of a mutant's tests says of it."""
    assert run.mutant
    verdict, why = Verdict.KILLED, ""
    unprepared = [event for event in run.events("test") if (event["when"], event["outcome"]) == ("setup", "failed")]
    if (wrong := run.wrong()) or unprepared:
        verdict, why = Verdict.BROKEN, wrong or f"{unprepared[0]['test']} fails as it is set up: {unprepared[0]['why']}"
    elif run.hung or any(event["hung"] for event in run.events("test")):
        verdict, why = Verdict.HUNG, "its tests did not end in time"
    else:
        ends = {named: {event["outcome"] for event in run.outcomes(named)} for named in run.tests}
        if green := [named for named, outcomes in ends.items() if "failed" not in outcomes]:
            verdict, why = (
                Verdict.SURVIVED,
                ", ".join(f"{named} {'passes' if ends[named] else 'is no test'}" for named in green),
            )
    return Outcome(run.mutant, verdict, why, run.seconds)


def unfit(run: Run) -> dict[str, tuple[Verdict, str]]:
    """Of the tests of a run of the code as it is: those that cannot judge a mutant, and why."""
    found: dict[str, tuple[Verdict, str]] = {}
    wrong = run.wrong()
    for named in run.tests:
        outcomes = run.outcomes(named)
        if failed := [event for event in outcomes if event["outcome"] == "failed"]:
            found[named] = Verdict.BROKEN, f"{failed[0]['test']} fails without the mutant: {failed[0]['why']}"
        elif wrong or run.hung or not outcomes:
            found[named] = (
                Verdict.BROKEN,
                f"{named} cannot be run without the mutant: {wrong or ('it hangs' if run.hung else 'it is no test')}",
            )
        elif all(event["outcome"] == "skipped" for event in outcomes):
            found[named] = Verdict.SKIPPED, f"{named} is skipped here: {outcomes[0]['why']}"
    return found
