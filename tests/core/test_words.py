"""The words of docs/words.md are those of the code, and words that were given up for them do not come back as names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIVEN_UP = {
    "bereft", "bundle", "bundles", "bury", "conductor", "course", "desk", "despair", "door", "doors", "doomed",
    "errand", "errands", "gate", "hail", "hailed", "hearsay", "heir", "heirs", "hungry", "keeping", "knock",
    "knocking", "labour", "lie",
    "obey", "pace", "ration", "rations", "rumour", "rumours", "sitting", "sorry", "muster", "reception", "stroke",
    "weather", "witness",
}  # fmt: skip
"""Standby lost, work units, to reap, a strategy's coordinator, generation or workload, status server, end of a wait,
listener, dropped, requests; join server, request and refusal; hello of a group, a loss that is reported, successor,
handling costs; a mapping's layout, to take a word, compute model, round batches, attempt, locked step, network model,
accounting."""
SOURCES = {path: path.read_text() for path in sorted((ROOT / "distbelief").rglob("*.py"))}


def words() -> list[str]:
    rows = re.findall(r"^\| ([a-z][a-z, ]*) \|", (ROOT / "docs" / "words.md").read_text(), re.MULTILINE)
    return [word for row in rows for word in row.split(", ")]


def names(path: Path) -> set[str]:
    """What a file calls itself, and its classes, functions, arguments and attributes, cut into words."""
    found = {path.stem}
    for node in ast.walk(ast.parse(SOURCES[path])):
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                found.add(node.name)
            case ast.arg():
                found.add(node.arg)
            case ast.Attribute():
                found.add(node.attr)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
    return {word.lower() for name in found for word in re.findall(r"[A-Z]?[a-z]+", name)}


def test_every_word_is_in_use_and_stands_once() -> None:
    listed, text = words(), "\n".join(SOURCES.values()).lower()
    assert len(listed) > 40
    assert len(listed) == len(set(listed))
    assert [word for word in listed if not re.search(rf"\b{word}s?\b", text.replace("_", " "))] == []


@pytest.mark.long
def test_words_that_were_given_up_name_nothing() -> None:
    found = {str(path.relative_to(ROOT)): gone for path in SOURCES if (gone := names(path) & GIVEN_UP)}
    assert not found
