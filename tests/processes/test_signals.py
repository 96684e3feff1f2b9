"""Ctrl-C, SIGTERM and the closing of the terminal, at any moment of the command: nothing swallows them, and nothing is
left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import SECONDS

IMPORTING = """
import os, signal, sys

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"] and "distbelief" in sys.orig_argv:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))
            except:
                pass

sys.meta_path.insert(0, Finder())
"""
"""Ctrl-C as a module is found, and an import that catches everything."""


PROCESSES, SIMULATED = "distbelief.places.processes.running", "distbelief.places.simulated.simulated"
"""Modules that a command imports last; of a job, when its run folder is there."""


@pytest.mark.parametrize(
    ("command", "at"),
    [
        ("train digits downpour", "torch"),
        ("join {ticket}", "msgspec"),
        ("launch downpour {script}", PROCESSES),
        ("simulate digits downpour --keep", SIMULATED),
    ],
)
def test_no_import_swallows_a_ctrl_c(tmp_path: Path, command: str, at: str) -> None:
    """An import with a bare `except:` took it for an error of its own, and the job trained to its end."""
    (tmp_path / "sitecustomize.py").write_text(IMPORTING)
    (tmp_path / "script.py").write_text("raise AssertionError('it was begun')")
    words = command.format(script=tmp_path / "script.py", ticket=tmp_path / "none.json").split()
    environment = {
        **os.environ,
        "AT": at,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "distbelief", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, "distbelief: interrupted before the job began\n")
    assert not list(tmp_path.glob("runs/*"))
