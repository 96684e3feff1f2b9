"""Waits: repeated looks at shared memory, and a thread beside the backward pass."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter, sleep

import torch

SPIN_SECONDS = 200e-6
"""Time to look without sleeping."""
NAP_SECONDS, NAPS_SECONDS = 50e-6, 1e-3
"""Shortest and longest sleep between two looks."""
NAP_SHARE = 1 / 16
"""Length of a sleep, as a share of the wait so far."""


def rest(waited: float) -> None:
    """Yield the core or sleep between two looks, after a wait of `waited` seconds."""
    if waited < SPIN_SECONDS:
        os.sched_yield()
    else:
        sleep(min(max(waited * NAP_SHARE, NAP_SECONDS), NAPS_SECONDS))


class Wait:
    """Wait of several rests, until progress ends it."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began: float | None = None

    def end(self) -> None:
        """End the wait: there was progress."""
        self._began = None

    def rest(self) -> bool:
        """Rest once; return whether the wait has been long enough to do other work."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        waited = now - self._began
        rest(waited)
        return waited >= SPIN_SECONDS


class ReductionThread:
    """Thread that runs tasks in order, beside the backward pass, and then calls `close`.

    `rest` waits for the next task, while a carrier moves its bytes; `wake` ends that wait.
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
        """Queue a task; return a future of its end."""
        future: torch.futures.Future[object] = torch.futures.Future()

        def task() -> None:
            try:
                if self._ended:
                    raise RuntimeError(self._ended)
                act()
                future.set_result(None)
            except Exception as error:  # the waiting thread raises this error, which is usually a lost peer
                error.__traceback__ = None  # the error's frames would keep the vectors alive
                future.set_exception(error)

        self._tasks.append(task)
        if self._ended:
            self._work_off()
        else:
            self._wake()
        return future

    def end(self) -> None:
        """End the thread after the tasks so far."""
        self.do(lambda: self._end("it was ended"))

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end, unless called by the thread itself."""
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
            self._end(f"its transfers cannot continue: {error!r}")
        self._close()
        self._work_off()  # tasks queued meanwhile must fail, or their callers would wait forever

    def _work_off(self) -> None:
        while self._tasks:
            self._tasks.popleft()()
