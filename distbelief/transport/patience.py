"""Waiting of an endpoint: it looks for a moment before it sleeps, as long as that pays."""

from __future__ import annotations

import os
import select
from time import monotonic

LOOK_SECONDS = 300e-6
"""Time of looking before sleep. To wake a process on another core takes 20 to 50 us, longer than a short message.
"""
CROWDED_SECONDS = 20e-6
"""A yield that takes longer has let somebody else work on this core: whoever looks would be in his way."""
REST_LIMIT = 63
"""Most waits that sleep at once after looks were in vain."""
_EVENTS = 128  # links served by one wait; the kernel goes round among the ready ones


class Patience:
    """Waits for the events of an epoll.

    After a look in vain the next wait sleeps at once, and twice as many after the next such look: crowded cores are
    hardly looked on.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._poll = epoll.poll
        self._rest = self._resting = 0

    def wait(self, timeout: float | None) -> list[tuple[int, int]]:
        """The events that are there, or the first to come within `timeout` seconds; None waits for ever."""
        poll = self._poll
        if self._resting or (timeout is not None and timeout <= LOOK_SECONDS):
            self._resting = max(0, self._resting - 1)
            return poll(timeout, _EVENTS)
        now = monotonic()
        end = now + LOOK_SECONDS
        while now < end:
            if events := poll(0, _EVENTS):
                self._rest = 0
                return events
            before = now
            os.sched_yield()
            now = monotonic()
            if now - before > CROWDED_SECONDS:
                break
        self._rest = self._resting = min(2 * self._rest + 1, REST_LIMIT)
        return poll(timeout, _EVENTS)
