"""A lock of a mapping that nobody gives back is given up, with who has it; one that has no process is held."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from distbelief.errors import JobFailed
from distbelief.fabric import waiting
from distbelief.transport import shared
from distbelief.transport.shared import Locks

HOLDER = """
import os, sys
from distbelief.transport.shared import Locks
held = Locks(os.open(sys.argv[1], os.O_RDWR))
held.take(3, lambda: False)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_who_waits_for_a_lock_gives_up_after_60_s_and_says_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").touch()
    descriptor = os.open(tmp_path / "memory", os.O_RDWR)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "memory")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert int(holder.stdout.readline()) == holder.pid
        seconds = (0.01 * tick for tick in range(10**6))  # one look at the clock after another
        monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
        monkeypatch.setattr(waiting, "sleep", bool)
        own = Locks(descriptor)
        with pytest.raises(JobFailed, match=rf"waited 60 s for lock 3, which process {holder.pid} holds"):
            own.take(3, lambda: False)
        assert 60 <= next(seconds) <= 61
        holder.communicate()
    assert own.take(3, lambda: False)
    os.close(descriptor)


@contextlib.contextmanager
def without_a_process(number: int) -> Iterator[Locks]:
    """Locks of a file, of which one is held by who has no process number here: by a lock of an open file."""
    descriptor = os.memfd_create("locks")
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    fcntl.fcntl(other, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    try:
        yield Locks(descriptor)
    finally:
        os.close(other)
        os.close(descriptor)


def test_a_lock_is_held_by_who_has_no_process_number() -> None:
    with without_a_process(2) as found:
        holders = [found.holder(number) for number in range(4)]
        assert [one is not None for one in holders] == [False, False, True, False]
        assert (holders[2] or 0) <= 0
