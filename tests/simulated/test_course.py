"""Every row of docs/course.md shows what it says; those with processes are in tests/processes."""

from pathlib import Path

import course
import pytest

from distbelief.cli.commands import COMMANDS


@pytest.mark.parametrize("row", course.WITHOUT, ids=str)
@pytest.mark.long
def test_a_row_shows_what_it_says(
    row: course.Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    course.check(row, tmp_path, monkeypatch, capsys)


def test_the_course_is_whole() -> None:
    """At least 40 rows, none twice, and each command but those of running jobs and of files of other machines."""
    rows = course.rows()
    assert len(rows) == len({row.commands for row in rows}) == len({row.said for row in rows}) >= 40
    named = {words[0] for row in rows for words in row.commands}
    assert {*COMMANDS} - named == {"launch", "check", "report", "expand", "join", "leave", "status", "watch"}
    assert len(course.WITH) < 10
