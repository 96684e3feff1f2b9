"""A lock of a mapping that nobody gives back is given up, with who has it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from distbelief.errors import JobFailed
from distbelief.transport import locks
from distbelief.transport.locks import Locks

HOLDER = """
import os, sys
from distbelief.transport.locks import Locks
held = Locks(os.open(sys.argv[1], os.O_RDWR))
held.take([3], lambda: False)
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
        monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=bool))
        waiting = Locks(descriptor, "replica of process {}".format)
        with pytest.raises(
            JobFailed, match=rf"waited 60 s for the lock of range 3, which replica of process {holder.pid} holds"
        ):
            waiting.take([3], lambda: False)
        assert 60 <= next(seconds) <= 61
        holder.communicate()
    assert waiting.take([3], lambda: False)
    os.close(descriptor)
