"""The two clocks: the wall's, which waits, and the simulator's, which jumps. Each can say the time, call later, and
take one turn.
"""

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
        """Seconds since some fixed moment."""
        ...

    def call_later(self, delay: float, function: Callable[[Argument], None], argument: Argument) -> None:
        """Call a function in `delay` seconds; of calls due at one moment, the one asked for first comes first."""

    def turn(self) -> None:
        """Let the next thing happen: something arrives, or the time comes for something that was to be called later."""

    def glance(self) -> None:
        """Let what has arrived be delivered and what is due be called, and wait for nothing."""


Argument = TypeVar("Argument")
Coming = list[tuple[float, int, Callable[[Any], None], Any]]
"""Heap of the calls to come: their moments, their order, and what is called with what."""


class WallClock:
    """Real time: a turn waits at an endpoint."""

    def __init__(self, endpoint: NetworkEndpoint) -> None:
        self.endpoint = endpoint
        """Endpoint at which it waits."""
        self.now = time.monotonic
        self._order = 0
        self._coming: Coming = []

    def call_later(self, delay: float, function: Callable[[Argument], None], argument: Argument) -> None:
        """Call a function in `delay` seconds."""
        self._order += 1
        heappush(self._coming, (self.now() + delay, self._order, function, argument))

    def turn(self) -> None:
        """Wait until something arrives, and deliver it; or until something is due, and call it."""
        if not self._coming:
            self.endpoint.poll(None)
        elif (left := self._coming[0][0] - self.now()) > 0:
            self.endpoint.poll(left)
        else:
            _, _, function, argument = heappop(self._coming)
            function(argument)

    def glance(self) -> None:
        """Deliver what has arrived, and call what is due."""
        self.endpoint.poll(0)
        while self._coming and self._coming[0][0] <= self.now():
            _, _, function, argument = heappop(self._coming)
            function(argument)


_ONE = (None,)
"""Told by every event."""
Call = tuple[float, int, Callable[[Any], None], Any, "deque[Any] | None"]
"""Call to come: its moment, its order, what is called with what, and the queue in which it stands."""


class VirtualClock:
    """Simulated time: a turn takes the earliest of what is to come and sets the time to it.

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
        """A heap: of the calls in a queue only the first, since a heap of all is slow (32,000 of 1,000 replicas)."""

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self.time

    @property
    def pending(self) -> bool:
        """True where any call is to come."""
        return bool(self._coming)

    def call_later(self, delay: float, function: Callable[[Argument], None], argument: Argument) -> None:
        """Call a function in `delay` seconds; of calls due at one moment, the one asked for first comes first."""
        self.call_at(self.time + delay, function, argument)

    def call_at(
        self, moment: float, function: Callable[[Argument], None], argument: Argument, queue: deque[Any] | None = None
    ) -> None:
        """Call a function at a moment that is not in the past.

        Args:
            moment: when.
            function: what is called.
            argument: with what.
            queue: of calls most of which are asked for in the order of their moments; only this clock touches it. It
                changes nothing but how long that takes.

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
            queue = None
        call = (moment, order, function, argument, queue)
        if queue is not None:
            queue.append(call)
        heappush(self._coming, call)

    def forget(self, queue: deque[Any]) -> None:
        """Call nobody of a queue any more; all in it were asked for in the order of their moments.

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
        """Do nothing: what has arrived by now is delivered already."""

    def turn(self) -> None:
        """Jump to the next event."""
        self.turn_until(_ONE)

    def turn_until(self, told: Sized) -> None:
        """Jump to the next event, and on from event to event, until one of them puts something into `told`.

        Raises:
            LocalProtocolError: nothing is to come, yet somebody waits: a deadlock.
        """
        coming = self._coming
        while coming:
            self.time, order, function, argument, queue = coming[0]
            if queue is not None:
                queue.popleft()
            if not queue:
                heappop(coming)
            elif queue[0][1] == order + 1 and queue[0][0] == self.time:
                coming[0] = queue[0]  # nothing else can be due before it
            else:
                heapreplace(coming, queue[0])
            self.events += 1
            function(argument)
            if told:
                return
        raise LocalProtocolError(
            f"at {self.time:.6f} s nothing is to come any more, but the job has not ended: everybody waits for somebody"
        )
