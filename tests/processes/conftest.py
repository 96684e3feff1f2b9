"""After every test here, nothing is left: no process, socket, segment of shared memory or temporary folder."""

import contextlib
import ctypes
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from patience import SECONDS

from distbelief.places.attempt import Attempt
from distbelief.places.processes import forkserver

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # where `jobs` is, for the tests and for the processes that they start
    sys.path.insert(0, HERE)

from jobs import Watch, descendants  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True, scope="session")
def temporary() -> Iterator[Path]:
    """Temporary files of these tests and their processes go to a folder of their own: others may run jobs on this
    machine too. Its path is short, for addresses of sockets in it are bounded.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def heard() -> None:
    """What began these tests may have had them ignore signals, as `nohup` and a shell in the background do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def traced_for_all() -> Iterator[None]:
    """All of these jobs are forked from one process, which the first of them starts: it has what torch traces with, or
    each partition, and each that wraps a model for DDP, would import that by itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "PRELOADED", [*forkserver.PRELOADED, *forkserver.TRACING])
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, temporary: Path) -> Iterator[None]:
    # orphans become children of this process, so that they can be seen
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    processes, before = descendants(os.getpid()), _held(os.getpid())
    yield
    deadline = monotonic() + SECONDS
    own = (
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    )  # type: ignore[attr-defined]
    left = {
        pid: title
        for pid, title in descendants(os.getpid()).items()
        if pid not in processes and pid not in own and not _ends(pid, deadline)
    }
    assert not left, f"processes are left: {left}"
    request.node.funcargs.clear()  # what fixtures have made is let go of: a segment lives as long as any tensor in it
    gc.collect()
    for pid in (os.getpid(), *filter(None, own)):
        held = _held(pid)
        mine = {
            what: name
            for what, name in held.items()
            if what not in before and (pid == os.getpid() or not name.startswith("socket"))
        }
        assert not mine, f"process {pid} still holds {sorted(mine.values())}"
    gc.freeze()  # what this test has imported is none for the next
    folders = [path.name for path in temporary.iterdir() if path.name.startswith(("distbelief", "pymp-"))]
    assert not folders, f"temporary folders are left: {folders}"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Sees every record of the jobs that run in this process."""
    watch = Watch()
    monkeypatch.setattr(Attempt, "record", lambda *record: watch.take(*record))
    return watch


def _ends(pid: int, deadline: float) -> bool:
    """Wait until a process has ended, and reap it."""
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


def _held(pid: int) -> dict[tuple[str, int], str]:
    """The sockets that a process holds, and the segments without a name (memfd) that it holds or maps."""
    found: dict[tuple[str, int], str] = {}
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):  # it has ended
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                name, inode = str(descriptor.readlink()), descriptor.stat().st_ino
                if name.startswith(("socket:", "/memfd:")):
                    found[name.partition(":")[0], inode] = name
        for line in (folder / "maps").read_text().splitlines():
            _, _, _, _, inode, *name = line.split(None, 5)
            if name and name[0].startswith("/memfd:"):
                found["/memfd", int(inode)] = name[0]
    return found
