"""How a process of a job settles: its title, its threads, the signals it leaves to its supervisor, and that it outlives nobody."""

from __future__ import annotations

import os
import select
import signal
import threading

import torch

from distbelief.cluster.forkserver import LEFT


def settle_process(role: str, supervisor: int, threads: int) -> None:
    """Give this process its title and its threads, leave Ctrl-C and the terminal to the supervisor, and end when that ends."""
    name_process(role)
    for number in LEFT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT)  # as the forkserver may have been begun: its own children are to have them
    torch.set_num_threads(threads)
    try:
        descriptor = os.pidfd_open(supervisor)
    except ProcessLookupError:
        raise SystemExit(1) from None
    threading.Thread(target=_outlive_nobody, args=(descriptor,), daemon=True).start()


def name_process(role: str) -> None:
    """Have this process called by its role."""
    import setproctitle

    setproctitle.setproctitle(f"distbelief: {role}")


def _outlive_nobody(supervisor: int) -> None:
    """End this process at once when the supervisor's has ended, however it did."""
    poll = select.poll()
    poll.register(supervisor, select.POLLIN)
    poll.poll()
    os._exit(1)
