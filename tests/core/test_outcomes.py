"""Every cause of an end is one that somebody gives, and nobody decides by the sentence beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distbelief
from distbelief.core.outcomes import Cause, Outcome

SOURCES = [path for path in sorted(Path(distbelief.__file__).parent.rglob("*.py")) if "testing" not in path.parts]


def named(path: Path, enum: str) -> Iterator[str]:
    """The members of an enum that a file names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum:
            yield node.attr


def test_somebody_gives_every_cause() -> None:
    given = {name for path in SOURCES if path.name != "outcomes.py" for name in named(path, "Cause")}
    errors = {
        "LOSS_NOT_FINITE",
        "TASK_RAISED",
        "WRONG_OPTION",
        "WRONG_DATA",
        "WRONG_MODEL",
        "WRONG_CHECKPOINT",
        "CUT_SHORT",
        "PROCESS_DIED",
        "BUG",
    }
    assert given | errors == {cause.name for cause in Cause}


def test_every_outcome_has_a_cause() -> None:
    assert {cause.outcome for cause in Cause} == set(Outcome)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_no_decision_reads_a_sentence(path: Path) -> None:
    """Neither what an error says, nor a reason; a hint that is added to the words of somebody else's error decides
    nothing.
    """
    tree = ast.parse(path.read_text())
    hints = {
        node
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef) and one.name == "hint"
        for node in ast.walk(one)
    }
    for node in ast.walk(tree):
        if node in hints:
            continue
        read: list[ast.expr] = []
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Constant)
            and isinstance(node.ops[0], ast.In | ast.NotIn)
        ):
            read = node.comparators
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith", "find", "count")
        ):
            read = [node.func.value]
        for one in map(ast.unparse, read):
            assert "reason" not in one and not one.startswith("str("), f"{path}, line {node.lineno}: decides by {one!r}"  # type: ignore[attr-defined]  # noqa: PT018
