"""The pump: a thread that carries a process's links while it computes, so that a fetch overlaps with a step."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from distbelief.transport.base import NetworkEndpoint


class Pump:
    """Thread that polls an endpoint, but only inside `running`: an endpoint is used by one thread at a time."""

    def __init__(self, endpoint: NetworkEndpoint) -> None:
        self._endpoint = endpoint
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._start, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._error: BaseException | None = None
        endpoint.watch(self._wake, self._woken)
        threading.Thread(target=self._run, name="pump", daemon=True).start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Carry the links while the caller does something else, without touching the endpoint."""
        self._stopping = False
        self._start.release()
        try:
            yield
        finally:
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run(self) -> None:
        while True:
            self._start.acquire()
            try:
                while not self._stopping:
                    self._endpoint.poll(None)
            except BaseException as error:  # raised in the thread that waits for this one
                self._error = error
            self._stopped.release()
