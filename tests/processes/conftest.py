"""After every test here, nothing is left on the machine: no process, no socket, no shared memory."""

import contextlib
import ctypes
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from distbelief.cluster.sitting import Sitting

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # where `jobs` is, for the tests and for the processes that they start
    sys.path.insert(0, HERE)

from jobs import Watch  # noqa: E402

PATIENCE = 10.0
"""Seconds that processes may take to end after a test, such as a forkserver whose job is over."""
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # orphans become children of this process, so that they can be seen
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    processes, sockets, memory = _descendants(), _sockets(), _shared_memory()
    yield
    deadline = monotonic() + PATIENCE
    own = (multiprocessing.forkserver._forkserver._forkserver_pid, multiprocessing.resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    left = {pid: title for pid, title in _descendants().items() if pid not in processes and pid not in own and not _ends(pid, deadline)}
    assert not left, f"processes are left: {left}"
    gc.collect()
    assert not (_sockets() - sockets), "sockets of this process are left open"
    assert not (_shared_memory() - memory), "segments are left in /dev/shm"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Sees every record of the jobs that run in this process."""
    watch = Watch()
    monkeypatch.setattr(Sitting, "record", lambda *record: watch.take(*record))
    return watch


def _descendants() -> dict[int, str]:
    """Every process below this one, with its command line."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found: dict[int, str] = {}
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found |= {pid: _title(pid) for pid in below}
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _ends(pid: int, deadline: float) -> bool:
    """Wait until a process has ended, and bury it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return True
    finally:
        os.close(descriptor)


def _sockets() -> set[str]:
    """The sockets that this process holds. Its shared memory lives as long as tensors in it do: pytest keeps those of fixtures until later."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith("socket:")}


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
