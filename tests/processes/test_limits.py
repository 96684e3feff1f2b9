"""What this machine limits or refuses is one clear error with the remedy."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
from patience import SECONDS

from distbelief.errors import JobFailed, UsageError
from distbelief.job import Job
from distbelief.places.messages import Failed
from distbelief.places.processes import forkserver
from distbelief.places.processes.local import Local
from distbelief.places.processes.processes import Processes
from distbelief.strategies import Allreduce, Downpour


def train(tmp_path: Path, before: str, words: str) -> subprocess.CompletedProcess[str]:
    """Train behind other words of a shell."""
    out = shlex.quote(str(tmp_path / "run"))
    line = f"{before} {shlex.quote(sys.executable)} -m distbelief train {words} --out {out}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=SECONDS, env=jobs.environment(), check=False
    )


HUNGRY = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
from distbelief.record import limits
before, free = limits.memory_kills(), limits.free_memory()
if not (child := os.fork()):
    b"x" * (400 << 20)
    os._exit(0)
print(os.waitpid(child, 0)[1], limits.memory_kills() - before, free >> 20)
"""


def test_the_kernel_counts_whom_memory_has_killed_and_what_a_group_has_left() -> None:
    """Of whichever version the groups of this machine are, where one may be made."""
    name = f"distbelief-{os.getpid()}"
    for group, limit in (
        (Path("/sys/fs/cgroup/memory", name), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup", name), "memory.max"),
    ):
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text("200M")
                words = [sys.executable, "-c", HUNGRY, str(group)]
                told = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
            finally:
                group.rmdir()
            status, kills, free = map(int, told.stdout.split())
            assert (status, kills) == (signal.SIGKILL, 1)
            assert 100 < free <= 200
            return
    pytest.skip("no group with a limit of memory can be made here")


@pytest.mark.parametrize(("files", "status"), [("-n 24", 2), ("-Sn 24", 0)])
def test_open_files_are_allowed_where_they_can_be_and_asked_for_otherwise(
    tmp_path: Path, files: str, status: int
) -> None:
    ended = train(tmp_path, f"ulimit {files}; exec", "digits downpour --quiet")
    assert ended.returncode == status, ended.stderr
    if status:
        assert ended.stderr.splitlines() == [
            "distbelief: this job needs some 60 open files in one process, and this machine allows 24: raise that "
            "(ulimit -n 60), or have fewer"
            " --replicas or --shards"
        ]
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["downpour", pytest.param("single", marks=pytest.mark.long)])
def test_files_that_may_not_be_as_long_as_the_model(tmp_path: Path, strategy: str) -> None:
    ended = train(tmp_path, "ulimit -f 64; exec", f"jobs:counting {strategy}")
    assert ended.returncode in (1, 2)
    assert "ulimit -f" in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_files_that_may_not_be_as_long_as_the_settings_leave_no_folder(tmp_path: Path) -> None:
    ended = train(tmp_path, "ulimit -f 1; exec", "digits downpour")
    assert ended.returncode in (1, 2)
    assert "ulimit -f" in ended.stderr
    assert not (tmp_path / "run").exists()


def without_network(tmp_path: Path, words: str) -> subprocess.CompletedProcess[str]:
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a network of his own")
    return train(tmp_path, "unshare -rn", words)


@pytest.mark.long
def test_shared_memory_needs_no_network(tmp_path: Path) -> None:
    ended = without_network(tmp_path, "digits allreduce --quiet")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_machine_that_cannot_reach_itself_is_told_at_once(tmp_path: Path) -> None:
    """Each replica found that out in each of its lives."""
    ended = without_network(tmp_path, "digits allreduce --transport tcp")
    assert ended.returncode == 2
    assert (
        "this machine cannot reach itself at 127.0.0.1: Network is unreachable; bring up its loopback (ip link set lo "
        "up)" in ended.stderr
    )
    assert not (tmp_path / "run").exists()


def test_an_error_that_the_next_life_would_repeat_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, lives = forkserver.fork, []
    say = Failed(JobFailed.__name__, "replica 1 cannot reach coordinator: there is no way")

    def dies(role: str, play: object, of: str, incarnation: int, spec: bytes) -> object:
        process, ours = fork(role, play, of, incarnation, spec)
        if role == "replica 1":
            lives.append(incarnation)
            process.kill()
        return process, ours

    end = Processes._take_end
    monkeypatch.setattr(forkserver, "fork", dies)
    monkeypatch.setattr(Processes, "_take_end", lambda self, child: [self._take(child, say), end(self, child)])
    with pytest.raises(JobFailed, match=r"^replica 1 cannot reach coordinator: there is no way; "):
        jobs.run(tmp_path / "run", Allreduce(replicas=2, restarts=5), Local())
    assert lives == [0, 1]


def refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def begin_no_thread(_: object) -> None:
    raise RuntimeError("can't start new thread")


REFUSED: dict[str, tuple[object, str, object, str]] = {
    "memory": (os, "memfd_create", refuse, r"^this machine refuses memfd_create \(Operation not permitted\): allow it"),
    "processes": (os, "pidfd_open", refuse, r"^this machine refuses pidfd_open \(Operation not permitted\): allow it"),
    "a temporary folder": (tempfile, "gettempdir", refuse, "name a folder that can be written, with .TMPDIR"),
    "threads": (
        threading.Thread, "start", begin_no_thread,
        "^this job needs some 17 processes and threads, and this machine begins 0 .*: raise what it allows .*replicas",
    ),
    "a folder": (os, "getcwd", refuse, r"^there is no working folder \(getcwd: Operation not permitted\): go to one"),
    "text": (os, "getcwd", lambda: os.fsdecode(b"/caf\xe9"), "^the working folder '/caf.udce9': is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_every_process_needs_is_looked_at_before_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Before any process, too: none is begun, and no folder made."""
    owner, name, instead, told = REFUSED[what]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "_server", lambda: SimpleNamespace(_forkserver_pid=None))
    monkeypatch.setattr(forkserver, "_ensure_running", lambda: pytest.fail("it was started"))
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(UsageError, match=told):
        Local().run(Job("digits", Downpour(replicas=2)))
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


WAITS = """
import os, sys
from distbelief.places.processes import forkserver

forkserver.start()
print(forkserver.pid(), flush=True)
sys.stdin.read()
"""


def test_the_forkserver_ends_with_its_command_whatever_it_imports(tmp_path: Path) -> None:
    """It imported torch to the end first, for seconds."""
    os.mkfifo(tmp_path / "never")
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'never')!r}).read()")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as command:  # fmt: skip
        assert command.stdout
        pid = int(command.stdout.readline())
        with open(tmp_path / "never", "wb"):  # it imports torch
            command.kill()
            poll = select.poll()
            poll.register(there := os.pidfd_open(pid), select.POLLIN)
            assert poll.poll(1000 * SECONDS)
            os.close(there)
