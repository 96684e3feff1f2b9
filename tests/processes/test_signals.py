"""Ctrl-C, SIGTERM and the end of the terminal, at any moment: nothing swallows them, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from patience import SECONDS

from distbelief.places import signals

IMPORTING = """
import os, signal, sys

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"] and "distbelief" in sys.orig_argv:
            try:
                os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
                sum(range(1000))
            except:
                pass

sys.meta_path.insert(0, Finder())
"""
"""A signal as a module is found, and an import that catches everything."""


PROCESSES, SIMULATED = "distbelief.places.processes.running", "distbelief.places.simulated.running"
"""Modules that a command imports last; of a job, when its run folder is there."""


def as_process_1(*command: str) -> list[str]:
    """The words that run a command as the first process of a container: with no signal blocked."""
    words = ["unshare", "-r", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a container")
    unblocked = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); os.execvp(sys.argv[1], "
    return [*words, sys.executable, "-c", f"{unblocked}sys.argv[1:])", *command]


@pytest.mark.parametrize(
    ("command", "at", "number", "first"),
    [
        ("train digits downpour", "torch", "SIGINT", False),
        ("train digits downpour", "distbelief.cli.commands", "SIGTERM", True),
        ("join {ticket}", "msgspec", "SIGHUP", False),
        ("launch downpour {script}", PROCESSES, "SIGINT", False),
        ("simulate digits downpour --keep", SIMULATED, "SIGTERM", False),
    ],
)
def test_no_import_swallows_a_signal(tmp_path: Path, command: str, at: str, number: str, first: bool) -> None:
    """An import with a bare `except:` took it for an error of its own, and the job trained to its end; the first
    process of a container got none for which it had no handler yet.
    """
    (tmp_path / "sitecustomize.py").write_text(IMPORTING)
    (tmp_path / "script.py").write_text("raise AssertionError('it was begun')")
    words = command.format(script=tmp_path / "script.py", ticket=tmp_path / "none.json").split()
    environment = {
        **os.environ,
        "AT": at,
        "SIGNAL": number,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    begun = [sys.executable, "-m", "distbelief", *words]
    ended = subprocess.run(
        as_process_1(*begun) if first else begun,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, "distbelief: interrupted before the job began\n")
    assert not list(tmp_path.glob("runs/*"))


FIRST = """
import os, signal, subprocess, sys
from distbelief.places import signals

signals.leave_process_1()
assert os.getpid() != 1
subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"], check=True)  # whose child is an orphan
while len([one for one in os.listdir("/proc") if one.isdecimal()]) > 2:
    pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.kill(1, signal.SIGTERM)
signal.pause()
"""


def test_the_first_process_of_a_container_waits_for_orphans_and_passes_signals_on() -> None:
    """It ends as the command does: nobody else would wait, and be told."""
    ended = subprocess.run(
        as_process_1(sys.executable, "-c", FIRST), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (ended.returncode, ended.stderr) == (7, "")


def test_what_was_ignored_stays_so_and_everything_else_is_heard_and_handled_as_before() -> None:
    own = {number: signal.getsignal(number) for number in signals.WORDS}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.waitable() as woken:
            for number in signals.WORDS:
                os.kill(os.getpid(), number)
            said = []
            while woken.poll(0):
                said.append(woken.recv_bytes().decode())
        assert sorted(said) == ["SIGTERM", "the terminal was closed"]
        with signals.raised():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert {number: signal.getsignal(number) for number in signals.WORDS} == own


def test_a_job_in_the_background_of_a_shell_trains_on_at_a_ctrl_c(tmp_path: Path) -> None:
    """That is of what runs in its foreground; SIGTERM is still of the job."""
    words = ["train", "jobs:counting", "single", "--epochs", str(jobs.MANY), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "distbelief", *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
        env=jobs.environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout
        lines = iter(process.stdout)
        assert any('"Stepped"' in line for line in lines)
        os.killpg(process.pid, signal.SIGINT)
        assert len([*zip(range(40), lines, strict=False)]) == 40
        process.send_signal(signal.SIGTERM)
        assert '"reason":"SIGTERM"' in [*lines][-1]
        assert process.wait(SECONDS) == 130
