"""Mutants: changes of the code, each a plausible mistake, that the tests of the promise which it breaks must notice.

To add one, append a `Mutant` to `MUTANTS` in the file of its area in `table/`, with the name of its promise in
`docs/guarantees.md`. Then

    make test-mutants MUTANTS=its-name

which is done when it says "killed". The name of a promise tries all of its mutants. One that survives shows a test that
cannot fail: mend the test, not the mutant.
Choose what somebody could write by mistake in the decision that the row is about (a check dropped, a sum where a mean
belongs, a wait skipped, a reset forgotten) and name the quickest tests that must notice, under 5 s each where there are
such.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One change of the code, and the tests that must fail with it."""

    name: str
    """Of small letters and dashes: what went wrong."""
    promise: str
    """The name in `docs/guarantees.md` of the promise that it breaks."""
    file: str
    """Below the package: `core/ledger.py`."""
    text: str
    """What it replaces; it stands exactly once in the file."""
    replacement: str
    tests: tuple[str, ...]
    """Names as pytest has them. Every one must fail; of one with parameters that are not named, at least one case."""
    seconds: float = 5.0
    """How long these tests take with the change made, about: ten times that and half a minute more is a hang."""
    hangs: bool = False
    """That the tests never end counts as noticed: they wait for what the change keeps from happening."""

    @property
    def processes(self) -> bool:
        """Whether its tests start processes, so that they need the machine for themselves."""
        return any(map(starts_processes, self.tests))


def starts_processes(test: str) -> bool:
    """Whether a test is in a folder of those that start processes."""
    return not test.startswith(("tests/core", "tests/machines", "tests/simulated", "tests/plain"))


@cache
def functions_of(file: Path) -> dict[str, ast.FunctionDef]:
    """The functions in a file, by name."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def left_out(root: Path, test: str) -> bool:
    """Whether `make test` does not play it: of tests with processes, long ones and those in folders of their own."""
    file, _, name = test.partition("::")
    if not starts_processes(test) or not file.startswith("tests/processes/"):
        return starts_processes(test)
    function, _, case = name.rstrip("]").partition("[")
    marks = [ast.unparse(mark) for mark in functions_of(root / file)[function].decorator_list]
    long = re.findall(r"(?:id='([^']*)', )?marks=pytest\.mark\.long", " ".join(marks))  # "" where a case has no name
    return "pytest.mark.long" in marks or case in long or "" in long


def table() -> list[Mutant]:
    """All mutants, of every file in `table/`."""
    package = importlib.import_module(f"{__name__}.table")
    files = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [mutant for name in files for mutant in importlib.import_module(f"{package.__name__}.{name}").MUTANTS]
