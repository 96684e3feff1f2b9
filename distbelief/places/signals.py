"""Signals: Ctrl-C, SIGTERM and the closing of the terminal, the processes of a container's first one, and whether a
process was stopped by a signal. Light: a command handles them before it imports anything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}
"""The signals that end a job, and what each is called."""
FROM_KERNEL = 0x80
"""The `si_code` of a signal that no process has sent: of a key, it went to all processes of the terminal."""


@contextlib.contextmanager
def handled(handler: Callable[..., object]) -> Iterator[None]:
    """Have the signals that end a job handled in the main thread; an ignored one (by nohup, or a shell) stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: own for number in WORDS if (own := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own or signal.SIG_DFL)  # None is what no Python code has set


def raised() -> contextlib.AbstractContextManager[None]:
    """Have them raise KeyboardInterrupt: whatever was begun is ended as that goes by."""
    return handled(signal.default_int_handler)


@contextlib.contextmanager
def waitable() -> Iterator[Connection]:
    """A connection from which a word can be received for each signal that comes, where this is the main thread.

    Nothing is raised: an exception at any line could be caught by whatever runs there, an import say, and then the
    signal would be lost.
    """
    import multiprocessing

    woken, wake = multiprocessing.Pipe(duplex=False)
    with woken, wake, handled(lambda number, _: wake.send_bytes(WORDS[signal.Signals(number)].encode())):
        yield woken


def leave_process_1() -> None:
    """Go on in a child, where this is the first process of a container: that one gets no signal which it does not
    handle, and all orphans, for whom it has to wait. It passes signals on to the child, and ends as that does.
    """
    if os.getpid() != 1:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if child := os.fork():
        os._exit(_wait_for_all(child))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_all(child: int) -> int:
    """Wait for whoever ends until a child does, with every signal blocked; returns the child's status."""
    while True:
        came = signal.sigwaitinfo(signal.valid_signals())
        if came.si_signo != signal.SIGCHLD:
            if came.si_code != FROM_KERNEL or came.si_signo == signal.SIGHUP:  # which the first one alone may get
                os.kill(child, came.si_signo)
            continue
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, and can do nothing until it is told to go on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def processor_seconds(pid: int) -> float:
    """Return what a process has used of the processor, with all that it has started."""
    used = 0.0
    with contextlib.suppress(OSError, ValueError):  # it has ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += sum(processor_seconds(int(child)) for child in (thread / "children").read_text().split())
    return used
