"""Signals: handling of those that end a job, and of all those that a container's first process gets.

The module is light: a command handles signals before it imports anything else.
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
"""Signals that end a job, each with a name that people know."""
FROM_KERNEL = 0x80
"""The `si_code` of a signal that no process has sent, such as by a key; all processes of the terminal got it."""


@contextlib.contextmanager
def handled(handler: Callable[..., object]) -> Iterator[None]:
    """Handle the signals that end a job, in the main thread; ignored ones (nohup, a shell) stay ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: own for number in WORDS if (own := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own or signal.SIG_DFL)  # None if no Python code had set a handler


def raised() -> contextlib.AbstractContextManager[None]:
    """Let these signals raise KeyboardInterrupt, which ends whatever has begun on its way up."""
    return handled(signal.default_int_handler)


@contextlib.contextmanager
def waitable() -> Iterator[Connection]:
    """Yield a connection that receives the name of each signal, if this is the main thread.

    Nothing is raised, as the running code, such as an import, could catch the exception. Then the signal would be lost.
    """
    import multiprocessing

    woken, wake = multiprocessing.Pipe(duplex=False)
    with woken, wake, handled(lambda number, _: wake.send_bytes(WORDS[signal.Signals(number)].encode())):
        yield woken


def leave_process_1() -> None:
    """Continue in a child if this is the first process of a container.

    The first process gets only the signals that it handles, and it has to wait for all orphans. It passes signals on to
    the child, and exits with the child's status.
    """
    if os.getpid() != 1:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if child := os.fork():
        os._exit(_wait_for_all(child))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_all(child: int) -> int:
    """Wait for each process that ends, with every signal blocked, until a child does; return that child's status."""
    while True:
        came = signal.sigwaitinfo(signal.valid_signals())
        if came.si_signo != signal.SIGCHLD:
            if came.si_code != FROM_KERNEL or came.si_signo == signal.SIGHUP:  # SIGHUP may reach this process alone
                os.kill(child, came.si_signo)
            continue
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process's /proc/PID/stat from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, until another signal continues it."""
    try:
        return stat_of(pid)[0] == "T"
    except OSError:
        return False


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and all processes that it started have used."""
    used = 0.0
    with contextlib.suppress(OSError, ValueError):  # it has ended
        used = sum(map(int, stat_of(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += sum(processor_seconds(int(child)) for child in (thread / "children").read_text().split())
    return used
