"""The rows of docs/course.md: what is said, the commands that show it, and what they are to print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from distbelief.cli import main

DOCUMENT = Path(__file__).parents[1] / "docs" / "course.md"
PROCESSES = {"train", "plan", "predict", "compress"}
"""Commands that start some."""
FRAMES = re.compile(r"[\s\u2500-\u257f]+")


class Row(NamedTuple):
    """One row of the table."""

    number: int
    said: str
    commands: tuple[tuple[str, ...], ...]
    """Without `distbelief`."""
    seen: tuple[str, ...]
    """What is printed, in this order."""

    def __str__(self) -> str:
        return f"{self.number} {' '.join(self.commands[-1])}"


def rows() -> list[Row]:
    """Read the table; a row without a command, or without anything to see, fails."""
    found = []
    for number, line in enumerate(re.findall(r"^\| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)[1:], 1):
        said, shown, seen = line.split(" | ")
        commands = [shlex.split(command) for command in re.findall(r"`distbelief ([^`]+)`", shown)]
        found.append(Row(number, said, tuple(map(tuple, commands)), tuple(re.findall(r"`([^`]+)`", seen))))
    return found


WITHOUT, WITH = ([row for row in rows() if any(PROCESSES & {*one[:1]} for one in row.commands) == wanted]
                 for wanted in (False, True))  # fmt: skip
"""Rows by whether they start processes."""


def check(row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a row in an empty folder: all that is to be seen is printed, in its order, but for the frames of tables."""
    monkeypatch.chdir(folder)
    printed = ""
    for words in row.commands:
        status = main.run(words)
        said = capsys.readouterr()
        if "distbelief: no MNIST" in said.err:
            pytest.skip("there is no MNIST on this machine")
        assert status == 0, said.err
        printed += FRAMES.sub(" ", said.out) + " "
    assert row.commands
    assert row.seen
    left = printed
    for phrase in row.seen:
        _, there, left = left.partition(phrase)
        assert there, f"{phrase!r} is not printed there, but:\n{printed}"
