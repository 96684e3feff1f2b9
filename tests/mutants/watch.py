"""A plugin of pytest in the tests of a mutant: sees that they import the copy, and notes how each test ended."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

COPY, MODULES, NAMED, REPORT = (
    "DISTBELIEF_MUTANT_COPY",
    "DISTBELIEF_MUTANT_MODULES",
    "DISTBELIEF_MUTANT_TESTS",
    "DISTBELIEF_MUTANT_REPORT",
)
"""In the environment: the copy's folder; what must be importable, and the tests, as JSON; the file to write to. Gone
before the first test.
"""


def covers(named: str, test: str) -> bool:
    """Whether a test is the one named, or a case of it."""
    return test == named or test.startswith(named + "[")


class Watch:
    """Writes one line of JSON for each event, so that what a hang ends is known up to there."""

    def __init__(self) -> None:
        self.copy, self.report = Path(os.environ.pop(COPY)), Path(os.environ.pop(REPORT))
        self.modules, self.named = json.loads(os.environ.pop(MODULES)), json.loads(os.environ.pop(NAMED))
        self.failed: set[str] = set()

    def write(self, kind: str, **more: Any) -> None:
        """Add a line."""
        with self.report.open("a") as file:
            file.write(json.dumps({"kind": kind, **more}) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        for module in self.modules:
            try:
                importlib.import_module(module)
            except BaseException as error:
                self.write("broken", why=f"{module} cannot be imported: {error!r}")
                raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("broken", why=f"{report.nodeid} cannot be collected: {_last_line(report)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave out the other cases of a test that has failed, where one failure is all that is asked."""
        if any(covers(named, item.nodeid) for named in self.failed):
            pytest.skip("another case has failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            line = _last_line(report)
            self.write(
                "test",
                test=report.nodeid,
                when=report.when,
                outcome=report.outcome,
                why=line,
                hung=line.startswith("Failed: Timeout (>"),
            )
        if report.failed and report.when != "setup":
            self.failed |= {named for named in self.named if covers(named, report.nodeid)}

    def pytest_sessionfinish(self) -> None:
        files = {
            name: getattr(module, "__file__", None)
            for name, module in sys.modules.items()
            if name.split(".")[0] == "distbelief"
        }
        self.write(
            "end", strange=sorted(file for file in files.values() if file and not Path(file).is_relative_to(self.copy))
        )


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """What went wrong, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr or "")
    return text.strip().splitlines()[0][:200] if text.strip() else ""


def pytest_configure(config: pytest.Config) -> None:
    """Watch this run."""
    config.pluginmanager.register(Watch())
