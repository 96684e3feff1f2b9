"""How a process of a job settles: its title, its threads, the signals it leaves to its supervisor, and that it outlives
nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading

import torch

from distbelief.places.processes.forkserver import LEFT

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
KEPT_BYTES = 1 << 30
"""Free memory that a process keeps for its next step."""
MAPPED_BYTES = 32 << 20
"""From how many bytes on a tensor is memory of its own, given back when it is freed; glibc takes no more."""


def settle_process(role: str, threads: int, *above: int) -> None:
    """Give this process its title and its threads, leave signals to the supervisor, and end as soon as one of the
    processes above it has ended.
    """
    name_process(role)
    _leave_signals()
    torch.set_num_threads(threads)
    _keep_memory()
    try:
        descriptors = [os.pidfd_open(one) for one in above]
    except ProcessLookupError:
        raise SystemExit(1) from None
    threading.Thread(target=_outlive_nobody, args=descriptors, daemon=True).start()


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
    """What the process that plays a role is called."""
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
    os._exit(1)
