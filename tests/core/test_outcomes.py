"""Every cause of an end is one that somebody gives, and nobody decides by the sentence beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import nodes_of

from distbelief.core.records import Cause, Outcome


def shipped() -> dict[str, list[ast.AST]]:
    return {name: nodes for name, nodes in nodes_of().items() if not name.startswith("testing/")}


def test_somebody_gives_every_cause() -> None:
    given = {
        node.attr
        for name, nodes in shipped().items()
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Cause"
        if name != "core/records.py"
    }
    errors = {
        "LOSS_NOT_FINITE", "TASK_RAISED", "WRONG_OPTION", "WRONG_DATA", "WRONG_MODEL", "WRONG_CHECKPOINT", "CUT_SHORT",
        "PROCESS_DIED", "BUG",
    }  # fmt: skip
    assert given | errors == {cause.name for cause in Cause}


def test_every_outcome_has_a_cause() -> None:
    assert {cause.outcome for cause in Cause} == set(Outcome)


def test_no_decision_reads_a_sentence() -> None:
    """Neither what an error says, nor a reason; a hint that is added to another's words decides nothing."""
    wrong = [told for name in shipped() for told in sentences_read(name)]
    assert not wrong, f"they decide by a sentence: {wrong}"


def sentences_read(name: str) -> Iterator[str]:
    hints = {
        node
        for one in shipped()[name]
        if isinstance(one, ast.FunctionDef) and one.name == "hint"
        for node in ast.walk(one)
    }
    for node in shipped()[name]:
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
            if "reason" in one or one.startswith("str("):
                yield f"{name}, line {node.lineno}: {one!r}"  # type: ignore[attr-defined]  # of expressions only
