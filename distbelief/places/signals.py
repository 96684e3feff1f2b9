"""Signals: Ctrl-C, SIGTERM and the closing of the terminal as something to wait for, and whether a process was stopped
by one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}
"""The signals that end a job, and what each is called."""


@contextlib.contextmanager
def waitable() -> Iterator[Connection]:
    """A connection from which a word can be received for each signal that comes, where this is the main thread.

    Nothing is raised: an exception at any line could be caught by whatever runs there, an import say, and then the
    signal would be lost.
    """
    woken, wake = multiprocessing.Pipe(duplex=False)
    if threading.current_thread() is not threading.main_thread():
        yield woken
        return
    before = {number: signal.getsignal(number) for number in WORDS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda number, _: wake.send_bytes(WORDS[signal.Signals(number)].encode()))
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        woken.close()
        wake.close()


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and can do nothing until it is told to go on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def processor_seconds(pid: int) -> float:
    """What a process has used of the processor, with all that it has started."""
    used = 0.0
    with contextlib.suppress(OSError, ValueError):  # it has ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += sum(processor_seconds(int(child)) for child in (thread / "children").read_text().split())
    return used
