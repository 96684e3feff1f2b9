"""The forkserver: the process that the processes of a job are forked from, with torch imported already. Light: it can
be started before torch is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from distbelief.transport.nameless import nameless, socket_folder

LEFT = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals that the processes of a job leave to their supervisor."""


GONE = "the forkserver, which starts the processes of the job, is gone: "
PRELOADED = ["distbelief.places.processes.process"]
"""What the processes of a job have imported."""
TRACING = ["torch._dynamo"]
"""What torch traces with: 0.7 s and 70 MB, which the partitions of a job would each have by themselves."""
UNTOLD = 255
"""The status of a process of which the forkserver has not told how it ended, since it is gone itself."""


def context() -> ForkServerContext:
    """The context of processes that start with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(traces: bool = False) -> None:
    """Start the forkserver, where it does not run yet; it imports torch while this process goes on.

    Args:
        traces: whether its processes trace a model: then it also imports what torch does that with, for all of them.
    """
    preloaded = context()
    if traces:
        preloaded.set_forkserver_preload([*PRELOADED, *TRACING])
    # a Ctrl-C reaches every process of the terminal, and a scheduler's SIGTERM the whole group: those of a job leave
    # them to their supervisor from
    # their first moment. What is blocked here is so in a process that is begun here, for good, and is kept for this one
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT)
    try:
        multiprocessing.resource_tracker.ensure_running()  # it lets signals through when it has begun
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT)
        _ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(name: str, target: Callable[..., None], *args: object) -> tuple[BaseProcess, Connection]:
    """A process that runs `target(*args, connection)`, and the other end of its connection.

    Raises:
        OSError, EOFError: the machine refuses.
    """
    made = context()
    with blank_main():
        ours, theirs = made.Pipe()
        try:
            process = made.Process(target=target, args=(*args, theirs), name=name)
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
    return process, ours


def pid() -> int:
    """Its process id."""
    return int(_server()._forkserver_pid)


def how_it_ended(seconds: float = 0.0) -> str:
    """That it is gone and how it ended, in words; "" where it runs, or does so after a while, or was never started."""
    if (number := _server()._forkserver_pid) is None:
        return ""
    try:
        descriptor = os.pidfd_open(number)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(1000 * seconds)
        finally:
            os.close(descriptor)
        ended = os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ProcessLookupError, ChildProcessError):  # somebody has waited for it already
        return f"{GONE}its process has ended"
    if ended is None:
        return ""
    killed = ended.si_code != os.CLD_EXITED
    how = f"was killed by {signal.Signals(ended.si_status).name}" if killed else f"ended with status {ended.si_status}"
    return f"{GONE}its process {how}"


def _server() -> Any:
    return multiprocessing.forkserver._forkserver


def _ensure_running() -> None:
    """Start it at an address without a name: its socket is reached through a descriptor of ours, so that no file
    outlives us, however we end.
    """
    server = _server()
    with _starting, socket_folder() as folder:
        multiprocessing.forkserver.ensure_running()
        if server._forkserver_address.startswith(f"{folder}/"):
            server._forkserver_address = nameless(server._forkserver_address)


_starting = threading.Lock()
_main_lock = threading.Lock()


@contextlib.contextmanager
def blank_main() -> Iterator[None]:
    """Hide the main module: our processes need nothing of the user's script, and must not run it again."""
    with _main_lock:
        real = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = real
