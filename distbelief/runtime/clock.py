"""The two clocks: real time, in which a turn waits, and simulated time, in which it jumps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sized
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol, TypeVar

from distbelief.errors import LocalProtocolError
from distbelief.transport.base import NetworkEndpoint


class Clock(Protocol):
    """Clock of a driver."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        ...

    def call_later(self, delay: float, function: Callable[[Argument], None], argument: Argument) -> None:
        """Call a function in `delay` seconds. Of calls that are due at the same moment, the first made comes first."""

    def turn(self) -> None:
        """Deliver the next arrival, or make the next call, whichever is first."""

    def glance(self) -> None:
        """Deliver what has arrived and make the calls that are due, without waiting."""


Argument = TypeVar("Argument")
Coming = list[tuple[float, int, Callable[[Any], None], Any]]
"""Heap of future calls: their moments, their order, the functions and their arguments."""


class WallClock:
    """Real time: a turn waits at an endpoint."""

    def __init__(self, endpoint: NetworkEndpoint) -> None:
        self.endpoint = endpoint
        self.now = time.monotonic
        self._order = 0
        self._coming: Coming = []

    def call_later(self, delay: float, function: Callable[[Argument], None], argument: Argument) -> None:
        self._order += 1
        heappush(self._coming, (self.now() + delay, self._order, function, argument))

    def turn(self) -> None:
        if not self._coming:
            self.endpoint.poll(None)
        elif (left := self._coming[0][0] - self.now()) > 0:
            self.endpoint.poll(left)
        else:
            _, _, function, argument = heappop(self._coming)
            function(argument)

    def glance(self) -> None:
        self.endpoint.poll(0)
        while self._coming and self._coming[0][0] <= self.now():
            _, _, function, argument = heappop(self._coming)
            function(argument)


_READY = (None,)
"""A result that is ready, so that a turn ends with its first event."""
Call = tuple[float, int, Callable[[Any], None], Any, "deque[Any] | None"]
"""A future call: its moment, its order, the function, the argument, and the queue of calls in which it stands."""


class VirtualClock:
    """Simulated time: a turn makes the earliest call, and sets the time to its moment.

    >>> clock = VirtualClock()
    >>> clock.call_later(2.0, print, "second"); clock.call_later(1.0, print, "first")
    >>> clock.turn(); clock.turn(); clock.now()
    first
    second
    2.0
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.events = 0
        self._order = 0
        self._coming: list[Call] = []
        """A heap that has only the first call of each queue: one with all calls is slow (32,000 for 1,000 replicas)."""

    def now(self) -> float:
        return self.time

    @property
    def pending(self) -> bool:
        """True if there are calls to come."""
        return bool(self._coming)

    def call_later(self, delay: float, function: Callable[[Argument], None], argument: Argument) -> None:
        self.call_at(self.time + delay, function, argument)

    def call_at(
        self, moment: float, function: Callable[[Argument], None], argument: Argument, queue: deque[Any] | None = None
    ) -> None:
        """Call a function at a moment that is not in the past.

        A `queue` holds calls that are mostly made in the order of their moments. It is for speed alone, and only the
        clock touches it.

        >>> clock, queue = VirtualClock(), deque()
        >>> for moment in (1.0, 3.0, 2.0): clock.call_at(moment, print, moment, queue)
        >>> clock.call_at(2.5, print, 2.5)
        >>> while clock.pending: clock.turn()
        1.0
        2.0
        2.5
        3.0
        """
        self._order = order = self._order + 1
        if queue:
            if moment >= queue[-1][0]:
                queue.append((moment, order, function, argument, queue))
                return
            queue = None  # this call is out of order: it goes into the heap, apart from the queue
        call = (moment, order, function, argument, queue)
        if queue is not None:
            queue.append(call)
        heappush(self._coming, call)

    def forget(self, queue: deque[Any]) -> None:
        """Cancel all calls of a queue, which were made in the order of their moments.

        >>> clock, queue = VirtualClock(), deque()
        >>> for moment in (1.0, 2.0): clock.call_at(moment, print, moment, queue)
        >>> clock.forget(queue); clock.pending
        False
        """
        if queue:
            self._coming.remove(queue[0])
            heapify(self._coming)
            queue.clear()

    def glance(self) -> None:
        """Do nothing: in simulated time all arrivals are delivered at once."""

    def turn(self) -> None:
        self.turn_until(_READY)

    def turn_until(self, results: Sized) -> None:
        """Jump from event to event, until one of them puts something into `results`.

        A job that waits while no event is to come is in a deadlock, which raises a `LocalProtocolError`.
        """
        coming = self._coming
        while coming:
            self.time, order, function, argument, queue = coming[0]
            if queue is not None:
                queue.popleft()
            if not queue:
                heappop(coming)
            elif queue[0][1] == order + 1 and queue[0][0] == self.time:
                coming[0] = queue[0]  # it is next: no call was made between these two
            else:
                heapreplace(coming, queue[0])
            self.events += 1
            function(argument)
            if results:
                return
        raise LocalProtocolError(
            f"at {self.time:.6f} s there is no event to come, but the job has not ended: every role waits for another"
        )
