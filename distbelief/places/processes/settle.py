"""Setup of a job's process: its title, threads, memory and signals; and its end, once its supervisor has ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import types
from pathlib import Path

import torch

from distbelief.core import roles
from distbelief.places.processes.forkserver import LEFT
from distbelief.places.processes.output import open_streams
from distbelief.places.processes.script import file_of, is_module, module_spec
from distbelief.places.processes.spec import Surroundings
from distbelief.runtime.loop import PLAYED
from distbelief.transport.addresses import share_descriptors

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
KEPT_BYTES = 1 << 30
"""Free memory that a process keeps for its next step."""
MAPPED_BYTES = 32 << 20
"""Least bytes of a tensor with a mapping of its own, which is returned to the system when freed: the most that glibc
allows."""


def enter(role: str, surroundings: Surroundings) -> None:
    """Give this process the folder, environment and paths of its supervisor, and let it end with the supervisor."""
    settle_process(role, surroundings.threads, surroundings.supervisor, surroundings.forkserver)
    os.chdir(surroundings.directory)
    os.environb.clear()
    os.environb.update(surroundings.environment)
    sys.path[:] = surroundings.path


def settle_process(role: str, threads: int, *above: int) -> None:
    """Set up the title, threads and signals of this process; it ends as soon as one of the processes above it ends.

    Processes that a user's code starts from here start as they would from any Python program.
    """
    name_process(role)
    open_streams()
    multiprocessing.set_start_method(None, force=True)  # the platform's default, instead of an inherited "forkserver"
    share_descriptors()
    _leave_signals()
    torch.set_num_threads(threads)
    _keep_memory()
    try:
        descriptors = [os.pidfd_open(one) for one in above]
    except ProcessLookupError:
        raise SystemExit(1) from None
    _watch(*descriptors)
    # a worker forked by a user's code keeps this process's links open: it must end with this process, and with those
    # above
    os.register_at_fork(after_in_child=lambda: _watch(os.pidfd_open(os.getppid()), *descriptors))


def as_main(script: list[str], role: str) -> None:
    """Prepare this process to run a user's script as its main program.

    The script finds its module, which its workers may import, its arguments and its folder. Output is by lines.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = file_of(script)
    if is_module(script):
        spec = module_spec(script[1])  # a spawned worker finds a module by its name, and any other script by its file
        vars(main).update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader)
        sys.argv[:] = [main.__file__, *script[2:]]
    else:
        sys.argv[:] = script
        sys.path.insert(0, str(Path(script[0]).resolve().parent))
    multiprocessing.current_process().name = "MainProcess"
    os.setpgid(0, 0)  # whatever the script starts is in this group, and ends with the group, even after an exec
    os.environ[PLAYED] = role
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # a text stream, which has it


def end_main() -> None:
    """End a user's script as a main program normally ends, so that its files are written.

    Its threads end first, then its exit functions run, then its objects are deleted.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing calls it too: nothing else ends the threads of a pool
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()


def _watch(*above: int) -> None:
    """Watch other processes (by descriptor) in a thread: this process ends as soon as one of them ends."""
    threading.Thread(target=_outlive_nobody, args=above, daemon=True).start()


def _leave_signals() -> None:
    """Leave signals that reach a whole terminal or group to the supervisor; they were blocked until now."""
    own = os.getpid()

    def leave(number: int, _: object) -> None:
        if os.getpid() != own:  # a process forked by a user's code ends as any other process does
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in LEFT:
        signal.signal(number, signal.SIG_IGN)
    # handled, not ignored: programs that a user's code starts would inherit ignored signals, and could not be ended
    signal.signal(signal.SIGTERM, leave)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT)


def _keep_memory() -> None:
    """Keep memory that a step frees for the next step.

    Without this, LeNet spends a sixth of a step on returning memory to the system and getting it again.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def name_process(role: str) -> None:
    """Set the title of this process to its role."""
    import setproctitle

    setproctitle.setproctitle(roles.title_of(role))


def _outlive_nobody(*above: int) -> None:
    """Wait until one of these processes (by descriptor) has ended, and end this process at once."""
    poll = select.poll()
    for descriptor in above:
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
