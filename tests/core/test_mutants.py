"""The table of mutants fits the code, the tests and the guarantees that it names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from mutants import Mutant, functions_of, left_out, table

ROOT = Path(__file__).parents[2]
MUTANTS = table()


def promises() -> dict[str, str]:
    """The promises of docs/guarantees.md by name, each with what it is not guaranteed in."""
    text = (ROOT / "docs/guarantees.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([^|]+ \|[^|]*) \|$", text, re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@cache
def source(file: str) -> str:
    return (ROOT / "distbelief" / file).read_text()


@pytest.mark.long
def test_mutants_change_one_place_each_and_name_tests_that_there_are() -> None:
    assert not {mutant.name: wrong for mutant in MUTANTS if (wrong := what_is_wrong(mutant))}


def what_is_wrong(mutant: Mutant) -> str:
    before, *after = source(mutant.file).split(mutant.text)
    if len(after) != 1 or mutant.replacement == mutant.text or not mutant.tests:
        return f"its text stands {len(after)} times in {mutant.file}, or it changes nothing, or it names no tests"
    try:  # the function or class that it changes; between these are two empty lines
        ast.parse(before.rpartition("\n\n\n")[2] + mutant.replacement + after[0].partition("\n\n\n")[0])
    except SyntaxError as error:
        return str(error)
    named = [test.partition("::") for test in mutant.tests]
    return ", ".join(name for file, _, name in named if name.partition("[")[0] not in functions_of(ROOT / file))


def test_every_promise_has_a_mutant_and_every_mutant_a_promise() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.promise for mutant in MUTANTS} == promises().keys()


def test_every_promise_is_read_once() -> None:
    assert not {name: text for name, text in promises().items() if len(text.replace("|", "").split()) > 36}


def test_all_but_a_few_mutants_die_by_what_everybody_runs() -> None:
    assert len([mutant.name for mutant in MUTANTS if any(left_out(ROOT, test) for test in mutant.tests)]) <= 15
