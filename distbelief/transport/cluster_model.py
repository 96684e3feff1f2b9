"""Model of a simulated cluster: its network, and the processors of its roles, which do one thing at a time."""

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

Argument = TypeVar("Argument")
Then = Callable[[Argument], None]


class Outage(CheckedStruct, frozen=True):
    """Time, in seconds, during which the roles of one side cannot reach those of the other."""

    start: float
    stop: float
    side: tuple[str, ...]
    """Roles of one side; all others are on the other side."""

    def check(self) -> None:
        """Refuse an impossible outage, with a `UsageError`."""
        if not 0 <= self.start < self.stop < float("inf"):
            raise UsageError(
                f"network outage from {self.start} s until {self.stop} s: it must begin at 0 or later, then end"
            )
        if not self.side:
            raise UsageError(
                f"network outage from {self.start} s until {self.stop} s: no role is on its side; name one, such as "
                "'replica 1'"
            )


class NetworkModel(CheckedStruct, frozen=True):
    """Model of a network. Times in seconds, rates in bytes per second."""

    latency: float = 50e-6
    bandwidth: float = 1.25e9
    jitter: float = 0.0
    """Largest extra delay of a message, as a fraction of the latency; drawn uniformly."""
    delay_chance: float = 0.0
    """Chance that a message takes `delay` longer, as after loss and retransmission."""
    delay: float = 0.0
    reduction: float = 0.0
    """Seconds to add one byte of an arriving gradient to another."""
    local_latency: float = 0.0
    """Latency between two roles of one host; 0 means that of all links, or of shared memory on `Hosts`."""
    local_bandwidth: float = 0.0
    """Bandwidth between two roles of one host; 0 means that of all links, or no limit in the memory of `Hosts`."""
    outages: tuple[Outage, ...] = ()

    def check(self) -> None:
        """Refuse an impossible network, with a `UsageError`."""
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


class Hosts(CheckedStruct, frozen=True):
    """Machines whose cores several roles share: shards and standbys are spread, the coordinator is on the first."""

    cores: int = 1
    """Cores of each host."""
    replicas: int = 0
    """Replicas on each host; 0 puts all roles on one host."""
    together: float = 1.0
    """Speed of a core while all cores of its host work, as a share of its speed alone."""
    busy: float = 0.0
    """Seconds of a step that need a core, 0 for all of it; for the rest the replica sleeps, as in padded steps."""

    def check(self) -> None:
        """Refuse impossible hosts, with a `UsageError`."""
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
        """Return the number of a role's host, in a job of `replicas` replicas.

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
    """Seconds that one role works for its messages."""

    def taking(self, event: Event, payload: Payload | None) -> float:
        """Return the cost of an arrival."""
        ...

    def saying(self, message: Message, payload: Payload | None) -> float:
        """Return the cost of a message that it sends."""
        ...

    def passing(self, message: Message, payload: Payload | None) -> float:
        """Return the cost of what the role does in memory instead of sending a message."""
        ...

    def landing(self, payload: Payload | None) -> float:
        """Return the cost of bringing an answer in memory to its vector."""
        ...

    def copy(self, length: int) -> float:
        """Return the cost of copying some bytes, or adding them to others."""
        ...

    def update(self, length: int) -> float:
        """Return the cost of an optimizer's step on some bytes of parameters."""
        ...


class SimulatorClock(Protocol):
    """Clock of the simulator, as networks and processors need it."""

    time: float

    def call_at(
        self, moment: float, function: Then[Argument], argument: Argument, queue: deque[Any] | None = None
    ) -> None:
        """Call a function at a moment; most calls of one queue are requested in the order of their moments."""

    def forget(self, queue: deque[Any]) -> None:
        """Cancel the calls of a queue."""


class Thread(ABC):
    """Thread of one role: it does its work in order, one piece after the other."""

    worked: float
    """Seconds of work so far, without steps."""

    @abstractmethod
    def do(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        """Work for `seconds`, and then call."""

    @abstractmethod
    def step(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        """Make a step of `seconds`, and then call; the step may not need a core all the time."""

    @abstractmethod
    def owe(self, seconds: float) -> None:
        """Work for `seconds`, which only delays later work."""

    @abstractmethod
    def works(self) -> bool:
        """Return whether work is left."""

    @abstractmethod
    def stop(self) -> None:
        """Drop all work and its calls: the role is dead."""


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
        """Queue of the clock with this thread's calls, which come in their order."""

    def do(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        self.worked += seconds
        clock, free = self._clock, self._free
        now = clock.time
        self._free = free = (free if free > now else now) + seconds
        clock.call_at(free, then, argument, self._queue)

    def step(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
        worked = self.worked  # steps do not count
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
    """Machine whose cores several roles share: all working roles have the same speed, each on one core at most.

    See `Hosts` for `together` and `busy`.

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
        """Heap of the threads that work, by the virtual time at which each is done."""
        # virtual time advances at a working thread's speed: as all have the same speed, the virtual time of an end
        # never changes
        self._virtual = self._since = 0.0
        """Virtual time, and the moment at which it was computed."""
        self._order = self._plans = 0

    def thread(self) -> SharedThread:
        """Return the thread of one more role."""
        return SharedThread(self, self._clock)

    def begin(self, thread: SharedThread, seconds: float) -> None:
        """Begin a role's work of `seconds`."""
        self._pass()
        self._order += 1
        heapq.heappush(self._working, (self._virtual + seconds, self._order, thread))
        self._plan()

    def end(self, thread: SharedThread) -> None:
        """End the work of a role."""
        self._pass()
        self._working = [entry for entry in self._working if entry[2] is not thread]
        heapq.heapify(self._working)
        self._plan()

    def speed(self, roles: int) -> float:
        """Return the speed of each working role, in seconds of work a second."""
        return speed(roles, self._cores, self._together)

    def _pass(self) -> None:
        """Bring virtual time to now."""
        now = self._clock.time
        if self._working:
            self._virtual += (now - self._since) * self.speed(len(self._working))
        self._since = now

    def _plan(self) -> None:
        """Ask the clock for a call when the next thread is done; a later plan replaces this one."""
        self._plans += 1
        if self._working:
            left = max(0.0, self._working[0][0] - self._virtual)
            self._clock.call_at(self._clock.time + left / self.speed(len(self._working)), self._end_first, self._plans)

    def _end_first(self, plan: int) -> None:
        if plan == self._plans:  # otherwise this plan is out of date: work has begun or ended since
            self._pass()
            self._virtual, _, thread = heapq.heappop(self._working)
            self._plan()
            thread.go_on()


def speed(working: float, cores: int, together: float) -> float:
    """Return the mean speed of each role that works on a host, in seconds of work a second.

    >>> [speed(working, 2, 0.9) for working in (1, 2, 3)]
    [1.0, 0.9, 0.6]
    """
    busy = min(working, cores)
    # linear from one busy core, at full speed, to all of them
    slowed = 1.0 - (1.0 - together) * (busy - 1) / max(cores - 1, 1)
    return slowed * busy / working


class SharedThread(Thread):
    """Thread of a role on a shared host."""

    def __init__(self, host: VirtualHost, clock: SimulatorClock) -> None:
        self._host, self._clock = host, clock
        self._given: deque[tuple[float, float, Then[Any] | None, Any]] = deque()
        """Pieces of work, each with its seconds, the least seconds until its end, and the call at its end."""
        self._began = self.worked = 0.0

    def do(self, seconds: float, then: Then[Argument] | None, argument: Argument) -> None:
        self.worked += seconds
        self._add(seconds, 0.0, then, argument)

    def step(self, seconds: float, then: Then[Argument], argument: Argument) -> None:
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
        """Continue after the first piece's work is done; a step may still sleep."""
        piece = self._given[0]
        if (end := self._began + piece[1]) > self._clock.time:
            self._clock.call_at(end, self._end, piece)
        else:
            self._end(piece)

    def _end(self, piece: tuple[float, float, Then[Any] | None, Any]) -> None:
        """End the first piece, unless its role has died meanwhile, and begin the next."""
        if not self._given or self._given[0] is not piece:
            return
        _, _, then, argument = self._given.popleft()
        if self._given:
            self._begin()
        if then is not None:
            then(argument)
