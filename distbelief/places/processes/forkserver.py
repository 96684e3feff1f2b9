"""The forkserver: the process that imports torch once, and forks the processes of a job.

This module imports no torch, so that a command can start the forkserver before it imports torch itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
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
"""Modules that the forkserver imports for the processes of a job."""
ENDS_WITH_PARENT = ["distbelief.places.processes.ends_with_parent"]
TRACING = ["torch._dynamo"]
"""Modules with which torch traces. They cost 0.7 s and 70 MB, in each partition unless the forkserver imports them."""
UNTOLD = 255
"""Exit status of a process whose real status is unknown, because the forkserver ended before reporting it."""
MOST_TRIED = 1000
"""Most threads that are started at once to test the machine's limit."""
OWN_TASKS = 5
"""Processes and threads besides those of the roles: the forkserver, the resource tracker, threads of this process."""
CALLS = "allow it in the seccomp profile of the container, or run on Linux 5.3 or newer"


def context() -> ForkServerContext:
    """Return the multiprocessing context of processes that start with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(traces: bool = False, tasks: int = 0) -> None:
    """Start the forkserver if it does not run yet; it imports torch while this process continues.

    Args:
        traces: whether its processes trace a model: then it also imports torch's tracing modules, for all of them.
        tasks: least number of processes and threads that the job needs.

    Raises:
        UsageError: this machine refuses a system call or a resource that every process of a job needs.
    """
    first = _server()._forkserver_pid is None
    if first:
        _check_machine()
    if first or tasks:
        _try_threads(tasks + OWN_TASKS)
    preloaded = context()
    # the signal comes when a thread ends: any thread but the main one may end before the processes do
    begun = ENDS_WITH_PARENT if threading.current_thread() is threading.main_thread() else []
    preloaded.set_forkserver_preload([*begun, *PRELOADED, *(TRACING if traces else [])])
    # Ctrl-C reaches every process of the terminal, and a scheduler's SIGTERM reaches the whole group. The processes of
    # a job leave both to their supervisor from the start. A process that is started here inherits the blocked signals
    # and keeps them blocked; this process receives its own once they are unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT)
    try:
        multiprocessing.resource_tracker.ensure_running()  # this unblocks signals in this process
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT)
        _ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_machine() -> None:
    """Refuse a machine that lacks something that every process of a job needs, before each process fails."""
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UsageError(f"there is no working folder (getcwd: {error.strerror}): go to one that exists") from error
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
    """Refuse a machine that cannot start this many threads at once.

    The system counts threads as it counts processes.
    """
    over, begun = threading.Event(), list[threading.Thread]()
    before = threading.stack_size(1 << 18)  # small stacks, since a memory limit counts them
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
    """Start a process that runs `target(*args, connection)`; return it and the other end of its connection.

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
    """Return the process id of the forkserver."""
    return int(_server()._forkserver_pid)


def how_it_ended(seconds: float = 0.0) -> str:
    """Return a sentence about how the forkserver ended; "" if it was never started, or still runs after `seconds`."""
    if (number := _server()._forkserver_pid) is None:
        return ""
    try:
        descriptor = os.pidfd_open(number)
        try:
            wait([descriptor], seconds)
        finally:
            os.close(descriptor)
        ended = os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ProcessLookupError, ChildProcessError):  # the status of that process was already collected
        return f"{GONE}its process has ended"
    if ended is None:
        return ""
    killed = ended.si_code != os.CLD_EXITED
    how = f"was killed by {signal.Signals(ended.si_status).name}" if killed else f"ended with status {ended.si_status}"
    return f"{GONE}its process {how}"


def _server() -> Any:
    return multiprocessing.forkserver._forkserver


def _ensure_running() -> None:
    """Start the forkserver at an address without a name.

    Its socket is reached through a descriptor of this process, so that no file is left behind, however this ends.
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
    """Hide the main module: a job's processes need nothing from the user's script, and must not run it again."""
    with _main_lock:
        real = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = real
