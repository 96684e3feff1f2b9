"""Handling of messages by the roles of a simulated cluster: seconds for each, and for the bytes that are read and
written because of it.
"""

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
    "adamax": 2, "lars": 1, "lamb": 2,
}  # fmt: skip
"""Vectors that an optimizer keeps beside the parameters."""


class Handling(CheckedStruct, frozen=True):
    """Cost to a role of taking a message, and of touching the bytes that it is about.

    The defaults are what `python -m benchmarks wire` measured on two cores: a push of 4 kB took 30 us there and back,
    which are two messages (6 us) and two waits to be woken (8 us, the latency of a link within a host); to update or
    to copy 64 MB
    took 4.6 to 5.1 ms, in which 128 MB are touched.
    """

    message: float = 6e-6
    """Seconds for each message that a role takes: the waking, the reading and the answering."""
    memory: float = 26e9
    """Bytes a second that are read or written; a vector that is read and written counts once."""

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the value.
        """
        if not 0 <= self.message < math.inf:
            raise UsageError(f"handling a message takes {self.message} s: must be 0 or more, and finite")
        if not self.memory > 0:
            raise UsageError(f"handling reads and writes {self.memory} bytes a second: must be more than 0")

    @property
    def addition(self) -> float:
        """Seconds for each byte of a vector that is added to another."""
        return 2 / self.memory


INSTANT = Handling(0.0, math.inf)
"""Messages that cost nobody any time."""


def touched(command: operations.AnyCommand) -> int:
    """Return how many vectors an operation reads or writes.

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
        handling: of the cluster.
        settings: of the job.
        length: bytes of the slice that it holds, of a shard or its standby.
        adds: whether additions of pieces of an all-reduce are counted here, and not by the network.
        in_place: whether parameters are wanted where they are, on the direct path.
        found: whether replicas compute where the shards hold the parameters, which are written to nobody.
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
        """Seconds of an optimizer's step on so many bytes of parameters: their gradient, they themselves and its state
        are touched.
        """
        return self._update * length * self._second

    def copy(self, length: int) -> float:
        """Seconds of reading so many bytes and writing them somewhere else, or of adding them there."""
        return 2 * length * self._second

    def passing(self, message: Message, payload: Payload | None) -> float:
        """Seconds that a replica works to do in memory what it would else tell a shard: an optimizer with a state
        steps a copy of the newest parameters and state.
        """
        seconds = self._message
        if isinstance(message, Push) and payload is not None:
            states = self._update - 2
            seconds += self.update(payload.nbytes) + (self.copy((1 + states) * payload.nbytes) if states else 0.0)
        return seconds

    def landing(self, payload: Payload | None) -> float:
        """Seconds that a replica works to have the answer to that where it wants it."""
        return 0.0 if self._in_place or payload is None else self.copy(payload.nbytes)

    def taking(self, event: Event, payload: Payload | None) -> float:
        """Seconds that a role works because of what it is told, before it says anything."""
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
        """Seconds that a role works for what it says, before that leaves."""
        if payload is not None:
            return self.copy(payload.nbytes) if type(message) in self._written else 0.0
        if self._gathers and isinstance(message, Pushed) and not message.dropped:
            # of a round: each gradient was added to its sum, and the first that is acknowledged tells of the update
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
"""The work that a message makes where it arrives, beside being read; the last ones' bytes are copied, or added."""


@functools.cache
def _costs(kind: type[Event]) -> tuple[bool, Callable[[HandlingCosts, Any, Payload | None], float] | None]:
    """Return whether events of a kind are messages, which cost time to take, and the other work that they make."""
    return issubclass(kind, Message), _TAKEN.get(kind)


_WRITTEN = frozenset({Push, Fetched, Contribute, Copied, WorkUnitTaken, StatePart})
"""Messages whose bytes are brought to where they can leave from, or straight to where they are wanted."""
