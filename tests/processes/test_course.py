"""The rows of docs/course.md that start processes show what they say."""

from pathlib import Path

import course
import pytest


@pytest.mark.parametrize("row", course.WITH, ids=str)
def test_a_row_shows_what_it_says(
    row: course.Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    course.check(row, tmp_path, monkeypatch, capsys)
