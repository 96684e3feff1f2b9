"""Links that outlast the coordinator: when it dies and restarts, both sides go on, and no message is lost or doubled.

A role that has lost its link keeps its messages, and opens the link again once the coordinator listens. A restarted
coordinator has replayed its journal, and so knows all messages to and from each role. Each side then says how many
messages have reached it, and gets the rest.

The journal begins with the coordinator's state as plain data, from which another object of its class takes it over. No
machine may depend on the order of a set, which is different in another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec

from distbelief.core import wire
from distbelief.core.conversations.linking import Resume, Resumed
from distbelief.core.effects import Arrival, Machine, Payload, Wake
from distbelief.core.events import Event, Lost, Woke
from distbelief.core.messages import Message
from distbelief.core.roles import COORDINATOR, STORE
from distbelief.core.settings import Settings, read_strategy
from distbelief.errors import JobFailed, LocalProtocolError, RemoteProtocolError
from distbelief.record.journal import Journal, JournalEntry
from distbelief.runtime.clock import Clock
from distbelief.transport.base import Endpoint

_PLAIN = (type(None), bool, int, float, str, bytes)
_MANY: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, deque)}


def remember(value: Any, kinds: Mapping[str, type]) -> object:
    """Turn a machine into plain data: scalars, and lists that begin with the name of their class.

    It may contain only objects of these `kinds`: messages, and objects whose state is their attributes. Attributes that
    are `forgotten` are left out.
    """
    name = type(value).__name__
    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if type(value) is dict:
        return ["dict", [[remember(key, kinds), remember(item, kinds)] for key, item in value.items()]]
    if _MANY.get(name) is type(value):
        return [name, [remember(item, kinds) for item in value]]
    if kinds.get(name) is not type(value):
        raise LocalProtocolError(f"a {name} cannot be stored: name it among the kinds, or mark it as forgotten")
    if isinstance(value, msgspec.Struct | Settings | tuple | Enum):
        return [name, msgspec.msgpack.encode(value)]
    kept = {attribute: item for attribute, item in vars(value).items() if not getattr(item, "forgotten", False)}
    return [name, [[attribute, remember(item, kinds)] for attribute, item in kept.items()]]


def recall(memory: object, kinds: Mapping[str, type], now: object = None) -> object:
    """Undo `remember`, in the object `now` if that has the class: then other references to it stay valid.

    >>> from distbelief.coordination.registry import Registry
    >>> registry, other, kinds = Registry(restarts=1), Registry(restarts=1), {"Registry": Registry}
    >>> registry.begin("replica 0", 3)
    >>> recall(remember(registry, kinds), kinds, other) is other, other.present("replica 0")
    (True, 3)
    """
    if not isinstance(memory, list):
        return memory
    name, held = memory
    if name == "dict":
        return {recall(key, kinds): recall(item, kinds) for key, item in held}
    if name in _MANY:
        return _MANY[name](recall(item, kinds) for item in held)
    kind = kinds[name]
    if issubclass(kind, msgspec.Struct | Settings | tuple | Enum):
        return msgspec.msgpack.decode(held, type=kind, dec_hook=read_strategy)
    whole = now if type(now) is kind else kind.__new__(kind)
    for attribute, item in held:
        setattr(whole, attribute, recall(item, kinds, getattr(whole, attribute, None)))
    return whole


SEEK_SECONDS = 0.1
"""Interval at which a role tries to reach an absent coordinator."""
AWAY_SECONDS = 20.0
"""Longest absence of the coordinator."""
KEPT, KEPT_EACH = 4096, 256
"""Number of messages that a role keeps, and number that the coordinator keeps for each role.

More are never under way to a receiver that listens.
"""
RETURN_SECONDS = 60.0
"""Time in which guests come back to a restarted coordinator.

It is long, since a step may take long, and no supervisor reports the death of a guest.
"""


class Session:
    """One side of the messages between two roles, which outlives their link: it counts them and keeps the last `kept`.

    >>> from distbelief.core.conversations.checkpointing import Go
    >>> from distbelief.core.conversations.membership import Leave
    >>> here, there = Session(), Session()
    >>> here.say(Go()); here.say(Leave()); there.heard += 1  # the second is lost
    >>> here.missed(there.heard)
    [Leave(for_good=False, stops=False)]
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.heard = 0
        """Number of messages received."""
        self.said = 0
        self.kept: deque[Message] = deque(maxlen=kept)

    def say(self, message: Message) -> None:
        """Count and keep a message of this side."""
        self.said += 1
        self.kept.append(message)

    def missed(self, heard: int) -> list[Message]:
        """Return the messages to send again to the other side, which has received `heard` of them.

        A number is refused if it is more than were sent, or if the rest is not kept any more.
        """
        missing = self.said - heard
        if not 0 <= missing <= len(self.kept):
            raise RemoteProtocolError(
                f"{heard} messages are said to have arrived, of {self.said}; the last {len(self.kept)} are kept"
            )
        return list(self.kept)[len(self.kept) - missing :]


class Caller:
    """A role's side of its link to the coordinator.

    `where` returns the coordinator's present address; `hear` takes the event that the coordinator is lost for good.
    """

    def __init__(
        self, endpoint: Endpoint, clock: Clock, where: Callable[[], str], hear: Callable[[Arrival], None]
    ) -> None:
        self._endpoint, self._clock, self._where, self._hear = endpoint, clock, where, hear
        self._session = Session()
        self.away: float | None = None
        """Time since which the coordinator is absent; None while it is there."""
        self.ended = False
        """True once the role has ended."""
        self._last = False
        self.then: Callable[[], None] = lambda: None
        """Called once the coordinator is back, or given up."""
        self._gone = Lost("it is away")

    @property
    def waits(self) -> bool:
        """True while it keeps messages for an absent coordinator."""
        return self.away is not None and not self.ended

    def open(self) -> None:
        """Open the link, at once or when the coordinator is there."""
        if error := self._reach():
            self._seek(Lost(error))

    def _reach(self) -> str:
        """Open the link; return why that failed, or ""."""
        try:
            self._endpoint.connect(COORDINATOR, self._where())
        except JobFailed as error:
            return str(error)
        return ""

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message; keep it if it is for an absent coordinator."""
        if to == COORDINATOR:
            self._session.say(message)
            if self.away is not None:
                return
        self._endpoint.send(to, message, payload)

    def takes(self, event: Event) -> bool:
        """Handle an event from the coordinator about the link; return whether the event is for the role."""
        if type(event) is Lost:
            if not self._last:
                self._seek(event)
            return self._last
        if type(event) is Resumed:
            self._resumed(event.heard)
            return False
        # a message counts as soon as it arrives: it is not sent again after a restart
        self._session.heard += 1
        return True

    def end_wait(self) -> None:
        """Note that the coordinator will not restart."""
        self._last = True
        if self.waits:
            self._give_up()

    def _seek(self, lost: Lost) -> None:
        if self.away is None:
            self.away, self._gone = self._clock.now(), lost
        if self._last:  # the loss was noted while the link was being opened
            self._give_up()
            return
        self._clock.call_later(SEEK_SECONDS, self._try, None)

    def _try(self, _: None) -> None:
        if self.away is None or self.ended:
            return
        if not self._reach():  # if another process answers at that address, the link is lost again
            self._endpoint.send(COORDINATOR, Resume(self._session.heard))
        elif self._clock.now() > self.away + AWAY_SECONDS:
            self._give_up()
        else:
            self._clock.call_later(SEEK_SECONDS, self._try, None)

    def _resumed(self, heard: int) -> None:
        try:
            if heard < 0:
                raise RemoteProtocolError("it goes on without this life of the role")
            missed = self._session.missed(heard)
        except RemoteProtocolError as error:
            self._gone = Lost(str(error))
            self._give_up()
            return
        self.away = None
        for message in missed:
            self._endpoint.send(COORDINATOR, message)
        self.then()

    def _give_up(self) -> None:
        self.ended = True
        self._hear(Arrival(COORDINATOR, self._gone))
        self.then()


# An event counts once it is in the journal, and the coordinator handles it only then. So its next life has all events
# that the last one acted on. During a replay it counts its messages but sends none: afterwards each role says what has
# reached it, and gets the rest.
class LastingHost:
    """The coordinator's side of its links.

    Args:
        kinds: classes of the machine's state; empty if its state cannot be stored, but only be rebuilt from its events.
        watched: roles whose deaths are reported by the processes that have started them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        machine: Machine,
        kinds: Mapping[str, type],
        journal: Journal,
        watched: Collection[str] = (),
    ) -> None:
        self._endpoint, self._machine, self._kinds = endpoint, machine, kinds
        self._journal, self._watched = journal, watched
        self._sessions: dict[str, tuple[int, Session]] = {}
        self._over: dict[str, int] = {}
        self._awaited: dict[str, int] = {}
        self.records = 0
        """Number of records that it has made, in all its lives."""
        self.wakes: list[Wake] = []
        """Wakes that it has asked the clock for, and that have not come."""
        self._replays = False
        self.ended = False
        """True if it had ended before it died: it only tells those that come back."""

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message to the known life of a role, or keep it until that comes back."""
        incarnation, session = self._sessions.get(to, (-1, None))
        if session is not None:
            session.say(message)
            # a role that is away gets the message when it comes back
            if not self._replays and to not in self._awaited and self._endpoint.incarnation_of(to) == incarnation:
                self._endpoint.send(to, message, payload)

    def takes(self, arrival: Arrival) -> Iterator[Arrival]:
        """Yield the events that the coordinator handles for an arrival, each once it is in the journal."""
        sender, event = arrival.sender, arrival.event
        incarnation = self._endpoint.incarnation_of(sender) if isinstance(event, Message) else -1
        if self.ended and type(event) is not Resume:
            return
        # the store's answer comes between effects of an event that is in the journal already
        if self._kinds and self._journal.long and sender != STORE:
            self._journal.begin(self._remember())
        before = self._sessions.get(sender, (incarnation,))[0]
        if before < incarnation and before > self._over.get(sender, -1):  # nobody has reported the death of this life
            yield self._noted(Arrival(sender, Lost(f"{sender} came again, as incarnation {incarnation}", before)), -1)
        if type(event) is Resume:
            self._resume(sender, incarnation, event.heard)
        else:
            yield self._noted(arrival, incarnation)

    def _noted(self, arrival: Arrival, incarnation: int) -> Arrival:
        self._journal.note(arrival.sender, incarnation, arrival.event)
        self._count(arrival.sender, incarnation, arrival.event)
        return arrival

    def replay(self) -> Iterator[JournalEntry]:
        """Restore the state with which the journal begins, and yield the events since.

        At the end it expects all roles back that it knew, and whose deaths were not reported.
        """
        self._replays = True
        if self._journal.memory:
            self._recall(self._journal.memory)
        for entry in self._journal.entries():
            self._count(*entry)
            yield entry
        self._replays = False
        self._awaited = {
            role: incarnation
            for role, (incarnation, _) in self._sessions.items()
            if incarnation > self._over.get(role, -1)
        }

    def missing(self) -> list[tuple[str, int]]:
        """Return the roles and lives that have not come back, and whose deaths no other process reports."""
        return [(role, incarnation) for role, incarnation in self._awaited.items() if role not in self._watched]

    def _remember(self) -> bytes:
        sessions = [
            [role, incarnation, session.heard, session.said, list(map(wire.encode, session.kept))]
            for role, (incarnation, session) in self._sessions.items()
        ]
        return msgspec.msgpack.encode(
            [remember(self._machine, self._kinds), sessions, self._over, self.records, self.wakes]
        )

    def _recall(self, held: bytes) -> None:
        machine, sessions, self._over, self.records, wakes = msgspec.msgpack.decode(held)
        recall(machine, self._kinds, self._machine)
        for role, incarnation, heard, sent, kept in sessions:
            session = self._session(role, incarnation)
            session.heard, session.said = heard, sent
            session.kept.extend(wire.decode(frame[wire.PREFIX.size :]) for frame in kept)
        self.wakes = msgspec.convert(wakes, list[Wake])

    def _count(self, sender: str, incarnation: int, event: Event) -> None:
        """Count an event of this life, or of an earlier one in a replay."""
        if isinstance(event, Lost):
            known = self._sessions.get(sender, (-1,))[0]
            self._over[sender] = max(self._over.get(sender, -1), event.incarnation if event.incarnation >= 0 else known)
            if known <= self._over[sender]:  # messages to this life are of no use any more
                self._sessions.pop(sender, None)
                self._awaited.pop(sender, None)
        elif isinstance(event, Woke):
            self.wakes.remove(next(wake for wake in self.wakes if wake.timer == event.timer))
        elif incarnation >= 0:
            self._session(sender, incarnation).heard += 1

    def _session(self, role: str, incarnation: int) -> Session:
        known = self._sessions.get(role)
        if known is None or known[0] != incarnation:
            known = self._sessions[role] = (incarnation, Session(KEPT_EACH))
            self._awaited.pop(role, None)
        return known[1]

    def _resume(self, role: str, incarnation: int, heard: int) -> None:
        # a life that counts as lost may not go on: its work has been dealt to others
        if incarnation <= self._over.get(role, -1):
            self._endpoint.send(role, Resumed(-1))
            return
        session = self._session(role, incarnation)
        missed = session.missed(heard)
        self._awaited.pop(role, None)
        self._endpoint.send(role, Resumed(session.heard))
        for message in missed:
            self._endpoint.send(role, message)
