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
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from distbelief.core.values import check_text
from distbelief.errors import UsageError, limit
from distbelief.transport.addresses import nameless, socket_folder

LEFT = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals that the processes of a job leave to their supervisor."""


GONE = "the forkserver, which starts the processes of the job, is gone: "
PRELOADED = ["distbelief.places.processes.process"]
"""Modules that the processes of a job have imported."""
ENDS_WITH_PARENT = ["distbelief.places.processes.ends_with_parent"]
TRACING = ["torch._dynamo"]
"""Modules that torch traces with: 0.7 s and 70 MB, which the partitions of a job would each have by themselves."""
UNTOLD = 255
"""The status of a process of which the forkserver has not told how it ended, since it is gone itself."""
MOST_TRIED = 1000
"""Threads that are begun at once, at most, to see whether the machine begins so many."""
OWN_TASKS = 5
"""Processes and threads beside those of the roles: the forkserver, the resource tracker, threads of this process."""
CALLS = "allow it in the seccomp profile of the container, or run on Linux 5.3 or newer"


def context() -> ForkServerContext:
    """The context of processes that start with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(traces: bool = False, tasks: int = 0) -> None:
    """Start the forkserver, where it does not run yet; it imports torch while this process goes on.

    Args:
        traces: whether its processes trace a model: then it also imports what torch does that with, for all of them.
        tasks: processes and threads that it is to start, at least.

    Raises:
        UsageError: this machine refuses what every process of ours needs.
    """
    first = _server()._forkserver_pid is None
    if first:
        _check_machine()
    if first or tasks:
        _try_threads(tasks + OWN_TASKS)
    preloaded = context()
    # which is for a thread: another than the main one may end before the processes do
    begun = ENDS_WITH_PARENT if threading.current_thread() is threading.main_thread() else []
    preloaded.set_forkserver_preload([*begun, *PRELOADED, *(TRACING if traces else [])])
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


def _check_machine() -> None:
    """Refuse a machine that lacks what every process of ours needs: what a first process could not do, all would fail
    with.
    """
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UsageError(f"there is no working folder (getcwd: {error.strerror}): go to one that is there") from error
    data = os.environ.get("DISTBELIEF_DATA", "")
    check_text(folder, f"the working folder {folder!r}")
    check_text(data, f"$DISTBELIEF_DATA {data!r}")
    calls: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("distbelief"),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    }
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as error:
            raise UsageError(f"this machine refuses {name} ({error.strerror}): {limit(error) or CALLS}") from error
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UsageError(f"{error.strerror}: name a folder that can be written, with $TMPDIR") from error


def _try_threads(count: int) -> None:
    """Begin so many threads at once, and end them: the system counts them as it does processes.

    Raises:
        UsageError: it begins fewer.
    """
    over, begun = threading.Event(), list[threading.Thread]()
    before = threading.stack_size(1 << 18)  # which is counted where memory is limited
    try:
        for _ in range(min(count, MOST_TRIED)):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            begun.append(thread)
    except RuntimeError as error:
        raise UsageError(
            f"this job needs some {count} processes and threads, and this machine begins {len(begun)} ({error}): raise "
            "what it allows (ulimit -u, the pids limit of a container), or have fewer --replicas or --shards"
        ) from error
    finally:
        over.set()
        threading.stack_size(before)
        for thread in begun:
            thread.join()


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
    """Return in words that it is gone and how it ended; "" where it runs, or does so after a while, or was never
    started.
    """
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
        os.environ["DISTBELIEF_STARTED_BY"] = str(os.getpid())
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ["DISTBELIEF_STARTED_BY"]
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
