"""The table of mutants fits the code, the tests and the guarantees that it names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from mutants import Mutant, table

ROOT = Path(__file__).parents[2]
MUTANTS = table()


def rows() -> dict[str, list[str]]:
    """The promises that hold, and the mutants that each names."""
    text = (ROOT / "docs/guarantees.md").read_text()
    lines = text.split("## Holds")[1].split("\n## ")[0].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in lines
        if line.startswith("| ") and not line.startswith("| promise")
    ]
    return {promise: re.findall(r"`([^`]+)`", (more or [""])[0]) for promise, _, _, *more in cells}


@cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_changes_one_place_and_names_tests_that_there_are(mutant: Mutant) -> None:
    text = (ROOT / "distbelief" / mutant.file).read_text()
    assert text.count(mutant.text) == 1
    assert mutant.replacement != mutant.text
    ast.parse(text.replace(mutant.text, mutant.replacement))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_of(file), test


def test_every_promise_names_its_mutants_and_every_mutant_its_promise() -> None:
    promises = rows()
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    found: dict[str, list[str]] = {promise: [] for promise in promises}
    for mutant in MUTANTS:
        of = [promise for promise in promises if promise.startswith(mutant.guarantee)]
        assert len(of) == 1, f"{mutant.name} is of {mutant.guarantee!r}, with which {len(of)} rows of the table begin"
        found[of[0]].append(mutant.name)
    for promise, names in promises.items():
        assert names, promise
        assert sorted(names) == sorted(found[promise]), promise
