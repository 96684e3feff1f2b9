"""Processors of a virtual cluster's roles: a machine each, or a host's cores. A role does one thing at a time."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from distbelief.core import roles
from distbelief.core.effects import Payload
from distbelief.core.events import Event
from distbelief.core.messages import Message
from distbelief.core.values import CheckedStruct
from distbelief.errors import UsageError


class Outage(CheckedStruct, frozen=True):
    """From `start` until `stop`, in seconds, the roles of one side cannot reach those of the other."""

    start: float
    stop: float
    side: tuple[str, ...]
    """The roles of one side; all others are on the other one."""

    def check(self) -> None:
        """Refuse an impossible outage.

        Raises:
            UsageError: naming the value.
        """
        if not 0 <= self.start < self.stop < float("inf"):
            raise UsageError(
                f"network outage from {self.start} s until {self.stop} s: it must begin at 0 or later, last, and end"
            )
        if not self.side:
            raise UsageError(
                f"network outage from {self.start} s until {self.stop} s: nobody is on its side; name a role, such as "
                "'replica 1'"
            )


class NetworkModel(CheckedStruct, frozen=True):
    """Model of a network. Times in seconds, rates in bytes per second."""

    latency: float = 50e-6
    bandwidth: float = 1.25e9
    jitter: float = 0.0
    """Each message takes up to this fraction of the latency longer, uniformly."""
    delay_chance: float = 0.0
    """Chance that a message is delayed by `delay` more, as by loss and retransmission."""
    delay: float = 0.0
    reduction: float = 0.0
    """Seconds per byte of a gradient that is added to another where it arrives."""
    local_latency: float = 0.0
    """Latency between two roles of one host; 0 is that of all links, or on `Hosts` that of shared memory."""
    local_bandwidth: float = 0.0
    """Bandwidth between two roles of one host; 0 is that of all links; in the memory of `Hosts` nothing is sent."""
    outages: tuple[Outage, ...] = ()
    """When who cannot reach whom."""

    def check(self) -> None:
        """Refuse a network that cannot be.

        Raises:
            UsageError: naming the value.
        """
        for name in ("latency", "jitter", "delay", "reduction", "local_latency"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"network {name} {getattr(self, name)} must be 0 or more, and finite")
        if not self.local_bandwidth >= 0:
            raise UsageError(f"network local_bandwidth {self.local_bandwidth} must be 0 or more")
        if not self.bandwidth > 0:
            raise UsageError(f"network bandwidth {self.bandwidth} must be more than 0")
        if not 0 <= self.delay_chance <= 1:
            raise UsageError(f"network delay chance {self.delay_chance} must be between 0 and 1")
        for outage in self.outages:
            outage.check()


Argument = TypeVar("Argument")
Then = Callable[[Argument], None]


class Hosts(CheckedStruct, frozen=True):
    """Machines whose cores several roles share; shards and standbys are spread, the coordinator is on the first."""

    cores: int = 1
    """Cores of each host."""
    replicas: int = 0
    """Replicas on each host; 0 for one host with all roles."""
    together: float = 1.0
    """The speed of a core while all cores of its host work, of that of one that works alone."""
    busy: float = 0.0
    """Seconds of a step that need a core; the rest is slept, as where steps are padded. 0 for all of it."""

    def check(self) -> None:
        """Refuse impossible hosts.

        Raises:
            UsageError: naming the value.
        """
        if self.cores < 1:
            raise UsageError(f"hosts with {self.cores} cores: must be 1 or more")
        if self.replicas < 0:
            raise UsageError(
                f"hosts with {self.replicas} replicas: must be 1 or more, or 0 for one host with all roles"
            )
        if not 0 < self.together <= 1:
            raise UsageError(
                f"hosts whose cores together have {self.together} of their speed: must be more than 0, and at most 1"
            )
        if self.cores == 1 and self.together != 1:
            raise UsageError(
                f"hosts whose cores together have {self.together} of their speed have one core: give them more cores, "
                "or leave it off"
            )
        if not 0 <= self.busy < math.inf:
            raise UsageError(f"hosts on which a step is busy for {self.busy} s: must be 0 or more, and finite")

    def place(self, role: str, replicas: int) -> int:
        """The number of the host that a role is on, in a job of so many replicas.

        >>> [Hosts(replicas=2).place(role, 4) for role in ("replica 1", "replica 2", "shard 1", "standby 1", "shard 2",
        ...     "coordinator")]
        [0, 1, 1, 0, 0, 0]
        """
        index = roles.index_of(role)
        if not self.replicas or index < 0:
            return 0
        if roles.is_replica(role):
            return index // self.replicas
        return (index + (roles.kind(role) is roles.Kind.STANDBY)) % max(1, -(-replicas // self.replicas))


class MessageCosts(Protocol):
    """Cost of messages to one role, in seconds."""

    def taking(self, event: Event, payload: Payload | None) -> float:
        """Because of what it is told."""
        ...

    def saying(self, message: Message, payload: Payload | None) -> float:
        """For what it says."""
        ...

    def passing(self, message: Message, payload: Payload | None) -> float:
        """For what it does in memory in the place of saying it."""
        ...

    def landing(self, payload: Payload | None) -> float:
        """To have the answer to that where it wants it."""
        ...

    def copy(self, length: int) -> float:
        """For so many bytes that are copied, or added to others."""
        ...

    def update(self, length: int) -> float:
        """For an optimizer's step on so many bytes of parameters."""
        ...


class SimulatorClock(Protocol):
    """The simulator's clock, as networks and processors need it."""

    time: float

    def call_at(
        self, moment: float, function: Then[Argument], argument: Argument, queue: deque[Any] | None = None
    ) -> None:
        """Call a function at a moment; of a queue most are asked for in the order of their moments."""

    def forget(self, queue: deque[Any]) -> None:
        """Call nobody of a queue any more."""


class Thread(ABC):
    """One role's: what it is given to do it does in that order, one after the other."""

    worked: float
    """Seconds of work that it was given, beside steps."""

    @abstractmethod
    def do(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        """Work for so many seconds, and then call."""

    @abstractmethod
    def step(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        """Make a step of so many seconds, and then call; it may not need a core for all of them."""

    @abstractmethod
    def owe(self, seconds: float) -> None:
        """Work for so many seconds, for which nobody waits but what comes after."""

    @abstractmethod
    def works(self) -> bool:
        """Return whether work is left."""

    @abstractmethod
    def stop(self) -> None:
        """Do nothing more, and call nobody: the role is dead."""


class OwnThread(Thread):
    """Thread of a role with a machine of its own.

    >>> from distbelief.runtime.clock import VirtualClock
    >>> clock = VirtualClock(); thread = OwnThread(clock)
    >>> thread.owe(1.0); thread.do(2.0, lambda _: print(clock.now()), None); clock.turn()
    3.0
    """

    __slots__ = ("_clock", "_free", "_queue", "worked")

    def __init__(self, clock: SimulatorClock) -> None:
        self._clock, self._free, self.worked = clock, 0.0, 0.0
        self._queue = deque[Any]()
        """The clock's queue of whom it is to call: what is given later is done later."""

    def do(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        self.worked += seconds
        clock, free = self._clock, self._free
        now = clock.time
        self._free = free = (free if free > now else now) + seconds
        clock.call_at(free, then, argument, self._queue)

    def step(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        worked = self.worked  # in which steps do not count
        self.do(seconds, then, argument)
        self.worked = worked

    def owe(self, seconds: float) -> None:
        self.worked += seconds
        now, free = self._clock.time, self._free
        self._free = (free if free > now else now) + seconds

    def works(self) -> bool:
        return self._free > self._clock.time or bool(self._queue)

    def stop(self) -> None:
        self._clock.forget(self._queue)


class VirtualHost:
    """A machine whose cores several roles share: all with work go at one speed, each on one core at most.

    Args:
        clock: of the simulation.
        cores: it has.
        together: the speed of a core while all work, of that of one that works alone.
        busy: seconds of a step in which it needs a core; 0 for all of it.

    >>> from distbelief.runtime.clock import VirtualClock
    >>> clock = VirtualClock(); host = VirtualHost(clock, cores=2)
    >>> for seconds in (2.0, 2.0, 4.0):  # at two thirds of a core each, until two of them are done at 3 s
    ...     host.thread().do(seconds, lambda _: print(round(clock.now(), 6)), None)
    >>> while clock.pending: clock.turn()
    3.0
    3.0
    5.0
    """

    def __init__(self, clock: SimulatorClock, cores: int, together: float = 1.0, busy: float = 0.0) -> None:
        self._clock, self._cores, self._together, self.busy = clock, cores, together, busy
        self._working: list[tuple[float, int, SharedThread]] = []
        """Threads that work, a heap by the work each will have been given when its own is done."""
        self._given = self._since = 0.0
        """Seconds of work that somebody who had always worked would have been given, and when that was so."""
        self._order = self._plans = 0

    def thread(self) -> SharedThread:
        """Return the thread of one more role."""
        return SharedThread(self, self._clock)

    def begin(self, thread: SharedThread, seconds: float) -> None:
        """A role begins to work for so many seconds."""
        self._pass()
        self._order += 1
        heapq.heappush(self._working, (self._given + seconds, self._order, thread))
        self._plan()

    def end(self, thread: SharedThread) -> None:
        """A role works no more."""
        self._pass()
        self._working = [entry for entry in self._working if entry[2] is not thread]
        heapq.heapify(self._working)
        self._plan()

    def speed(self, roles: int) -> float:
        """Return the speed of each working role, in seconds of work a second."""
        return speed(roles, self._cores, self._together)

    def _pass(self) -> None:
        """Give those who work what is theirs of the time that has passed."""
        now = self._clock.time
        if self._working:
            self._given += (now - self._since) * self.speed(len(self._working))
        self._since = now

    def _plan(self) -> None:
        """Be called when the next is done, as things stand."""
        self._plans += 1
        if self._working:
            left = max(0.0, self._working[0][0] - self._given)
            self._clock.call_at(self._clock.time + left / self.speed(len(self._working)), self._end_first, self._plans)

    def _end_first(self, plan: int) -> None:
        if plan == self._plans:
            self._pass()
            self._given, _, thread = heapq.heappop(self._working)
            self._plan()
            thread.go_on()


def speed(working: float, cores: int, together: float) -> float:
    """Return the mean speed of each role that works on a host, in seconds of work a second.

    Args:
        working: how many.
        cores: of the host.
        together: the speed of a core while all work, of that of one that works alone.

    >>> [speed(working, 2, 0.9) for working in (1, 2, 3)]
    [1.0, 0.9, 0.6]
    """
    busy = min(working, cores)
    slowed = 1.0 - (1.0 - together) * (busy - 1) / max(cores - 1, 1)
    return slowed * busy / working


class SharedThread(Thread):
    """Thread of a role on a shared host."""

    def __init__(self, host: VirtualHost, clock: SimulatorClock) -> None:
        self._host, self._clock = host, clock
        self._given: deque[tuple[float, float, Then[Any] | None, Any]] = deque()
        """Pieces of work: seconds of work, the least seconds until it is over, and what is called then."""
        self._began = self.worked = 0.0

    def do(self, seconds: float, then: Then[Argument] | None, argument: Argument) -> None:
        self.worked += seconds
        self._add(seconds, 0.0, then, argument)

    def step(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        """Work as long as a step is busy, sleep for what is left of it, and then call."""
        self._add(min(self._host.busy or seconds, seconds), seconds, then, argument)

    def _add(self, work: float, least: float, then: Then[Argument] | None, argument: Argument) -> None:
        self._given.append((work, least, then, argument))
        if len(self._given) == 1:
            self._begin()

    def _begin(self) -> None:
        self._began = self._clock.time
        self._host.begin(self, self._given[0][0])

    def owe(self, seconds: float) -> None:
        self.do(seconds, None, None)

    def works(self) -> bool:
        return bool(self._given)

    def stop(self) -> None:
        if self._given:
            self._given.clear()
            self._host.end(self)

    def go_on(self) -> None:
        """The work of the first piece is done."""
        piece = self._given[0]
        if (end := self._began + piece[1]) > self._clock.time:
            self._clock.call_at(end, self._end, piece)
        else:
            self._end(piece)

    def _end(self, piece: tuple[float, float, Then[Any] | None, Any]) -> None:
        """The first piece is over, unless its role has died meanwhile."""
        if not self._given or self._given[0] is not piece:
            return
        _, _, then, argument = self._given.popleft()
        if self._given:
            self._begin()
        if then is not None:
            then(argument)
