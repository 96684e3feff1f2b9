"""Locks of a memory that processes share: byte-range locks of its file, which the kernel takes from who ends."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable

from distbelief.errors import JobFailed
from distbelief.fabric.waiting import Wait

LOCK_SECONDS = 60.0
"""Limit for waiting for a lock: much longer than a stopped process (SIGSTOP) is let live."""
_FLOCK = struct.Struct("hhqqi4x")  # kind, whence, start, length, process


class Locks:
    """One process's locks; each is a byte of the file, whether there is such a byte or not.

    Args:
        descriptor: of the file, which this keeps open: with any that a process closes, its locks on that file are gone.

    >>> locks = Locks(os.memfd_create("example"))
    >>> locks.take(3, lambda: False), locks.holder(3), locks.give(3)
    (True, None, None)
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def take(self, number: int, arrived: Callable[[], bool]) -> bool:
        """Take a lock; False where `arrived` says that something came, asked after each rest longer than a look.

        Raises:
            JobFailed: it was not to be had for `LOCK_SECONDS`.
        """
        began, wait = time.monotonic(), Wait()
        while not self._try(number):
            if wait.rest():
                if time.monotonic() - began > LOCK_SECONDS:
                    process = self.holder(number)
                    raise JobFailed(
                        f"waited {LOCK_SECONDS:.0f} s for lock {number}, which process {process} holds: is it stuck?"
                    )
                if arrived():
                    return False
        return True

    def give(self, number: int) -> None:
        """Give a lock back."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def holder(self, number: int) -> int | None:
        """Return the other process that holds a lock, 0 or less where it is of another PID namespace; None for none."""
        answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        kind, _, _, _, process = _FLOCK.unpack(answer)
        return None if kind == fcntl.F_UNLCK else process

    def _try(self, number: int) -> bool:
        """Take a lock, if it is free; whether it was."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True
