"""Costs of messages in a simulated cluster: seconds for each, and for the bytes that a role reads or writes for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from distbelief.core.conversations import operations
from distbelief.core.conversations.grouping import ReducedPiece, State
from distbelief.core.conversations.initialising import Initialise
from distbelief.core.conversations.mirroring import Copied, CopyUse, StatePart, WorkUnitTaken
from distbelief.core.conversations.operations import Contribute, Operate
from distbelief.core.conversations.pushing import Fetched, Push, Pushed
from distbelief.core.effects import Payload
from distbelief.core.events import Event
from distbelief.core.messages import Message
from distbelief.core.settings import Settings
from distbelief.core.values import CheckedStruct
from distbelief.errors import UsageError

STATES = {
    "sgd": 0, "momentum": 1, "nesterov": 1, "adagrad": 1, "adadelta": 2, "rmsprop": 1, "adam": 2, "adamw": 2,
    "nadam": 2, "radam": 2,
    "adamax": 2, "lars": 1, "lamb": 2, "asgd": 1, "average": 0, "delayed-nesterov": 2,
}  # fmt: skip
"""Number of vectors that an optimizer keeps besides the parameters."""


class Handling(CheckedStruct, frozen=True):
    """Cost to a role of receiving a message, and of touching the bytes that it concerns.

    The defaults were measured with `python -m benchmarks wire` on two cores. A round trip with a push of 4 kB took
    30 us: two messages (6 us each) and two wake-ups (8 us each, the latency of a link within a host). An update or a
    copy of 64 MB touches 128 MB, and took 4.6 to 5.1 ms.
    """

    message: float = 6e-6
    """Seconds for each message that a role receives: to wake, to read it and to answer."""
    memory: float = 26e9
    """Bytes that are read or written in a second; a vector that is read and written counts once."""

    def check(self) -> None:
        """Refuse impossible values, with a `UsageError`."""
        if not 0 <= self.message < math.inf:
            raise UsageError(f"handling a message takes {self.message} s: must be 0 or more, and finite")
        if not self.memory > 0:
            raise UsageError(f"handling reads and writes {self.memory} bytes a second: must be more than 0")

    @property
    def addition(self) -> float:
        """Return the seconds for each byte of a vector that is added to another."""
        return 2 / self.memory


INSTANT = Handling(0.0, math.inf)
"""Handling that takes no time."""


def touched(command: operations.AnyCommand) -> int:
    """Return the number of vectors that an operation reads or writes.

    >>> touched(operations.Dots((("s", "s"), ("s", "y")))), touched(operations.Combine(((1.0, "g"), (2.0, "s")), "d"))
    (2, 3)
    """
    match command:
        case operations.Zero() | operations.Scale():
            return 1
        case operations.Copy() | operations.Add():
            return 2
        case operations.Combine():
            return len({name for _, name in command.terms} | {command.into})
        case operations.Dots():
            return len({name for pair in command.pairs for name in pair})
        case operations.AbsoluteNorms():
            return len(command.of)
        case operations.Gather():
            return len(command.into)


class HandlingCosts:
    """Costs of one role's messages.

    Args:
        length: returns the bytes of the slice that a shard or its standby holds.
        adds: whether additions in an all-reduce are counted here, and not by the network.
        in_place: whether replicas on the direct path compute on the parameters in place.
        found: whether replicas compute in the shards' memory, so that fetched parameters are not copied.
    """

    def __init__(
        self,
        handling: Handling,
        settings: Settings,
        length: Callable[[], int],
        adds: bool = True,
        in_place: bool = False,
        found: bool = False,
    ) -> None:
        self._message, self._second = handling.message, 1 / handling.memory
        self._update = 2 + STATES.get(settings.optimizer.name, 2)
        self._gathers, self._adds = settings.policy.gathers, adds
        self._length, self._in_place = length, in_place
        self._written = _WRITTEN - {Fetched} if found else _WRITTEN
        self._known = 0

    def update(self, length: int) -> float:
        """Return the seconds of an optimizer's step on some bytes of parameters.

        It touches the parameters, their gradient and the optimizer's state.
        """
        return self._update * length * self._second

    def copy(self, length: int) -> float:
        """Return the seconds to copy some bytes, or to add them to others."""
        return 2 * length * self._second

    def passing(self, message: Message, payload: Payload | None) -> float:
        """Return the seconds that a replica works on a message that it handles itself, in the shards' memory.

        An optimizer with a state steps a copy of the newest parameters and state.
        """
        seconds = self._message
        if isinstance(message, Push) and payload is not None:
            states = self._update - 2
            seconds += self.update(payload.nbytes) + (self.copy((1 + states) * payload.nbytes) if states else 0.0)
        return seconds

    def landing(self, payload: Payload | None) -> float:
        """Return the seconds that a replica works to copy the answer of such a message to its own memory."""
        return 0.0 if self._in_place or payload is None else self.copy(payload.nbytes)

    def taking(self, event: Event, payload: Payload | None) -> float:
        """Return the seconds that a role works on an event before it sends anything."""
        counts, work = _costs(type(event))
        seconds = self._message if counts else 0.0
        return seconds if work is None else seconds + work(self, event, payload)

    def _take_operate(self, event: Operate, _: Payload | None) -> float:
        return sum(map(touched, event.commands)) * self._length() * self._second

    def _take_push(self, _: Push, payload: Payload | None) -> float:
        return 0.0 if self._gathers or payload is None else self.update(payload.nbytes)

    def _take_copied(self, event: Copied, payload: Payload | None) -> float:
        if payload is None:
            return 0.0
        return self.copy(payload.nbytes) if event.what is CopyUse.GATHER else self.update(payload.nbytes)

    def _take_piece(self, event: ReducedPiece, payload: Payload | None) -> float:
        return self.copy(payload.nbytes) if payload is not None and (self._adds or not event.adds) else 0.0

    def _take_bytes(self, _: Event, payload: Payload | None) -> float:
        return 0.0 if payload is None else self.copy(payload.nbytes)

    def saying(self, message: Message, payload: Payload | None) -> float:
        """Return the seconds that a role works on a message before it leaves."""
        if payload is not None:
            return self.copy(payload.nbytes) if type(message) in self._written else 0.0
        if self._gathers and isinstance(message, Pushed) and not message.dropped:
            # in a round, each gradient is added to its sum; the first acknowledgement of a round shows its update
            seconds, updates = self.copy(self._length()), message.version.updates
            if updates != self._known:
                self._known = updates
                seconds += self.update(self._length())
            return seconds
        return 0.0


_TAKEN: Mapping[type[Event], Callable[[HandlingCosts, Any, Payload | None], float]] = {
    Operate: HandlingCosts._take_operate,
    Push: HandlingCosts._take_push,
    Copied: HandlingCosts._take_copied,
    ReducedPiece: HandlingCosts._take_piece,
    **dict.fromkeys((Initialise, Contribute, WorkUnitTaken, StatePart, State), HandlingCosts._take_bytes),
}
"""Work of the receiver for each kind of message, besides reading it; bytes of the last kinds are copied or added."""


@functools.cache
def _costs(kind: type[Event]) -> tuple[bool, Callable[[HandlingCosts, Any, Payload | None], float] | None]:
    """Return whether events of a kind are messages, which take time to receive, and what other work they cause."""
    return issubclass(kind, Message), _TAKEN.get(kind)


_WRITTEN = frozenset({Push, Fetched, Contribute, Copied, WorkUnitTaken, StatePart})
"""Messages whose bytes the sender copies, to memory from which they are sent or directly to the receiver's."""
