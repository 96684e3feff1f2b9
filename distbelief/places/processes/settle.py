"""Settling of a job's process: its title, its threads, the signals it leaves to its supervisor, and that it outlives
nobody.
"""

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
"""From how many bytes on a tensor is memory of its own, given back when it is freed; glibc takes no more."""


def enter(role: str, surroundings: Surroundings) -> None:
    """Have this process be where the one is that has it started, and end with it."""
    settle_process(role, surroundings.threads, surroundings.supervisor, surroundings.forkserver)
    os.chdir(surroundings.directory)
    os.environb.clear()
    os.environb.update(surroundings.environment)
    sys.path[:] = surroundings.path


def settle_process(role: str, threads: int, *above: int) -> None:
    """Give this process its title and its threads, leave signals to the supervisor, and end as soon as one of the
    processes above it has ended. What a user's code starts from here is started as it would be without us.
    """
    name_process(role)
    open_streams()
    multiprocessing.set_start_method(None, force=True)  # the platform's: a process of a forkserver inherits that one
    share_descriptors()
    _leave_signals()
    torch.set_num_threads(threads)
    _keep_memory()
    try:
        descriptors = [os.pidfd_open(one) for one in above]
    except ProcessLookupError:
        raise SystemExit(1) from None
    _watch(*descriptors)
    # a worker that a user's code forks holds our links open: it ends with this process, as with those above
    os.register_at_fork(after_in_child=lambda: _watch(os.pidfd_open(os.getppid()), *descriptors))


def as_main(script: list[str], role: str) -> None:
    """Have a user's script (its file or module, and its arguments) find what it would as the main program of this
    process, which plays a role: its module, which its workers may import, its arguments, its folder, and output by
    lines.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = file_of(script)
    if is_module(script):
        spec = module_spec(script[1])  # a spawned worker finds it by its name, and any other script by its file
        vars(main).update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader)
        sys.argv[:] = [main.__file__, *script[2:]]
    else:
        sys.argv[:] = script
        sys.path.insert(0, str(Path(script[0]).resolve().parent))
    multiprocessing.current_process().name = "MainProcess"
    os.setpgid(0, 0)  # with all that the script starts, which ends with it, whatever program that has become
    os.environ[PLAYED] = role
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # text of this process, which can be


def end_main() -> None:
    """Have a user's script end as the main program of a process does: its threads first, then what it has registered
    for its end, then what it holds, so that its files are written out.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing calls it: a pool's threads end for nothing else
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()


def _watch(*above: int) -> None:
    """Have this process end as soon as one of others (by descriptor) has ended."""
    threading.Thread(target=_outlive_nobody, args=above, daemon=True).start()


def _leave_signals() -> None:
    """Leave to the supervisor what is sent to the whole terminal or group. The forkserver was begun with them
    blocked.
    """
    own = os.getpid()

    def leave(number: int, _: object) -> None:
        if os.getpid() != own:  # what a user's code has forked from this process ends as any other does
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in LEFT:
        signal.signal(number, signal.SIG_IGN)
    # ignored, it would be so in every program that a user's code starts, and nobody could end these
    signal.signal(signal.SIGTERM, leave)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT)


def _keep_memory() -> None:
    """Keep what a step frees for the next one: giving it back and having it anew, page by page, took a sixth of a step
    of LeNet.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def title_of(role: str) -> str:
    """Return what the process that plays a role is called."""
    return f"distbelief: {role}"


def name_process(role: str) -> None:
    """Have this process called by its role."""
    import setproctitle

    setproctitle.setproctitle(title_of(role))


def _outlive_nobody(*above: int) -> None:
    """End this process at once when one of others has ended, however it did."""
    poll = select.poll()
    for descriptor in above:
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
