"""Waits for what others do: looks at memory that they share, and a thread beside the backward pass."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter, sleep

import torch

SPIN_SECONDS = 200e-6
"""Time of looking again at once, before one sleeps between two looks."""
NAP_SECONDS, NAPS_SECONDS = 50e-6, 1e-3
"""The shortest sleep, and the longest."""
NAP_SHARE = 1 / 16
"""Share of the time waited so far for which one sleeps."""


def rest(waited: float) -> None:
    """Give the core away between two looks at what one has waited for so many seconds."""
    if waited < SPIN_SECONDS:
        os.sched_yield()
    else:
        sleep(min(max(waited * NAP_SHARE, NAP_SECONDS), NAPS_SECONDS))


class Wait:
    """A wait that lasts until something is got on with."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began: float | None = None

    def end(self) -> None:
        """Something was got on with."""
        self._began = None

    def rest(self) -> bool:
        """Give the core away; whether one has waited so long that there is time for something else."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        waited = now - self._began
        rest(waited)
        return waited >= SPIN_SECONDS


class ReductionThread:
    """A thread that does one thing after the other, and waits for others, beside the backward pass.

    Args:
        rest: waits until there is something to do; what has to be carried meanwhile, it carries.
        wake: has that come back.
        close: is called at the end.
    """

    def __init__(
        self,
        rest: Callable[[], object] | None = None,
        wake: Callable[[], None] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        waiting = threading.Semaphore(0)
        self._rest, self._wake, self._close = rest or waiting.acquire, wake or waiting.release, close
        self._tasks: deque[Callable[[], None]] = deque()
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
        self._thread.start()

    def do(self, act: Callable[[], None]) -> torch.futures.Future[object]:
        """Have the thread do something; returns what will have its end, or the error."""
        future: torch.futures.Future[object] = torch.futures.Future()

        def task() -> None:
            try:
                if self._ended:
                    raise RuntimeError(self._ended)
                act()
                future.set_result(None)
            except Exception as error:  # of a peer that is gone: told to whoever waits
                error.__traceback__ = None  # its frames hold the vectors
                future.set_exception(error)

        self._tasks.append(task)
        if self._ended:
            self._work_off()
        else:
            self._wake()
        return future

    def end(self) -> None:
        """Do nothing more, when what was asked for before is done."""
        self.do(lambda: self._end("it was ended"))

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, unless it is the thread that asks."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _end(self, why: str) -> None:
        self._ended = why

    def _run(self) -> None:
        try:
            while not self._ended:
                self._work_off()
                if not self._ended:
                    self._rest()
        except Exception as error:
            self._end(f"what it waits for cannot be carried any more: {error!r}")
        self._close()
        self._work_off()  # who waits for it is not to wait for ever

    def _work_off(self) -> None:
        while self._tasks:
            self._tasks.popleft()()
