"""Locks on ranges of a mapping: byte-range locks of its file, which the kernel takes from a process that ends."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Sequence

from distbelief.errors import JobFailed
from distbelief.fabric.waiting import Wait

LOCK_SECONDS = 60.0
"""Limit for waiting for a lock: much longer than a stopped process (SIGSTOP) is let live."""
_FLOCK = struct.Struct("hhqqi4x")  # kind, whence, start, length, process


class Locks:
    """One process's locks; each is a byte of the file, whether there is such a byte or not.

    Args:
        descriptor: of the file, which this keeps open: with any that a process closes, its locks on that file are gone.
        named: says which role a process is, for whoever asks.

    >>> locks = Locks(os.memfd_create("example"))
    >>> locks.take([0, 3], lambda: False), locks.waits(), locks.give([0, 3])
    (True, '', None)
    """

    def __init__(self, descriptor: int, named: Callable[[int], str] = "process {}".format) -> None:
        self._descriptor, self._named = descriptor, named
        self._wanted = -1

    def take(self, numbers: Sequence[int], arrived: Callable[[], bool]) -> bool:
        """Take locks in an order that is the same for all; where `arrived` says that something came, none: False.

        Raises:
            JobFailed: one of them was not to be had for `LOCK_SECONDS`.
        """
        for at, number in enumerate(numbers):
            if not (self.try_one(number) or self._wait(number, arrived)):
                self.give(numbers[:at])
                return False
        return True

    def give(self, numbers: Sequence[int]) -> None:
        """Give locks back."""
        for number in numbers:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def waits(self) -> str:
        """For which lock this waits, and who has it; "" where for none."""
        if self._wanted < 0:
            return ""
        holder = self.holder(self._wanted)
        return f"for the lock of range {self._wanted}" + (f", which {self._named(holder)} holds" if holder else "")

    def holder(self, number: int) -> int:
        """The process that holds a lock; 0 where no other does, or one of another PID namespace."""
        kind, process = self._found(number)
        return 0 if kind == fcntl.F_UNLCK else process

    def is_held(self, number: int) -> bool:
        """Return whether another process holds a lock."""
        return self._found(number)[0] != fcntl.F_UNLCK

    def _found(self, number: int) -> tuple[int, int]:
        """Return the kernel's kind of a lock, and the process that holds it."""
        answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        kind, _, _, _, process = _FLOCK.unpack(answer)
        return kind, process

    def try_one(self, number: int) -> bool:
        """Take a lock, if it is free; whether it was."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait(self, number: int, arrived: Callable[[], bool]) -> bool:
        began = time.monotonic()

        def told_in_time() -> bool:
            if time.monotonic() - began > LOCK_SECONDS:
                raise JobFailed(f"waited {LOCK_SECONDS:.0f} s {self.waits()}: is it stuck?")
            return arrived()

        self._wanted = number
        try:
            return try_until(lambda: self.try_one(number), told_in_time)
        finally:
            self._wanted = -1


def try_until(done: Callable[[], bool], arrived: Callable[[], bool]) -> bool:
    """Try until done; False where `arrived` says that something has come, asked after each rest longer than a look."""
    wait = Wait()
    while not done():
        if wait.rest() and arrived():
            return False
    return True
