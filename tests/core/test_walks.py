"""Walks: how many files of the package a reader opens to follow what happens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import distbelief as db
from distbelief.places.processes import forkserver
from distbelief.places.processes.processes import Processes

ROOT = str(Path(db.__file__).parent)
MOST = 26
"""Files between `Local.run` and the start of the first process; 42 when they were first counted."""


class FirstStart(Exception):
    """The first process would be started now."""


def test_few_files_lie_between_a_run_and_its_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, str] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event == "call" and code.co_filename.startswith(ROOT) and code.co_flags & 2
        ):  # a function, no class or module
            files.setdefault(code.co_filename[len(ROOT) + 1 :], code.co_qualname)

    def start(*_: object) -> None:
        sys.setprofile(None)
        raise FirstStart

    monkeypatch.setattr(forkserver, "start", lambda *_: True)
    monkeypatch.setattr(Processes, "start", start)
    job, place = db.Job("digits", "downpour", out=str(tmp_path / "run")), db.Local()
    for _ in range(2):  # what the first imports and keeps is not walked again
        files.clear()
        sys.setprofile(note)
        try:
            with pytest.raises(FirstStart):
                place.run(job)
        finally:
            sys.setprofile(None)
    assert len(files) <= MOST, "\n".join(f"{file}: {name}" for file, name in files.items())
