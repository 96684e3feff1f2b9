"""The signals that end a job, as something that its supervisor can wait for."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection


@contextlib.contextmanager
def signals() -> Iterator[Connection]:
    """Turn Ctrl-C, SIGTERM and the closing of the terminal into something that can be waited for, where this is the main thread."""
    woken, wake = multiprocessing.Pipe(duplex=False)
    if threading.current_thread() is not threading.main_thread():
        yield woken
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda *_: wake.send_bytes(b"!"))
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        woken.close()
        wake.close()
