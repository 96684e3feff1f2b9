"""Links to the coordinator that last: when it dies and comes again, both sides go on where they were, and nothing is
missed or heard twice.

A role that has lost its link keeps what it says, and opens the link again as soon as somebody listens there. The
coordinator that has come again has gone through its journal, so that it knows what each has told it, and what it has
told each. Then each tells the other how much it has heard, and is told the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from distbelief.core import wire
from distbelief.core.conversations.linking import Resume, Resumed
from distbelief.core.effects import Arrival, Machine, Payload, Wake
from distbelief.core.events import Event, Lost, Woke
from distbelief.core.messages import Message
from distbelief.core.roles import COORDINATOR, STORE
from distbelief.errors import JobFailed, RemoteProtocolError
from distbelief.record.journal import Journal, JournalEntry
from distbelief.runtime.clock import Clock
from distbelief.runtime.machine_memory import recall, remember
from distbelief.transport.base import Endpoint

SEEK_SECONDS = 0.1
"""Between two tries to reach a coordinator that is away."""
AWAY_SECONDS = 20.0
"""Limit for the coordinator's absence."""
KEPT, KEPT_EACH = 4096, 256
"""Messages that are kept, the last ones; and of those that the coordinator keeps for each role, of which it asks little
at a time. More are not on their way to somebody who listens.
"""
RETURN_SECONDS = 60.0
"""Time that a coordinator which has come again gives the guests that it knew: a step may take long, and nobody else
tells of their deaths.
"""


class Session:
    """One side of what two roles say to each other, which outlives their link: counts what was said and heard, and
    keeps what was said last.

    Args:
        kept: how many of what is said.

    >>> from distbelief.core.conversations.checkpointing import Go
    >>> from distbelief.core.conversations.membership import Leave
    >>> here, there = Session(), Session()
    >>> here.say(Go()); here.say(Leave()); there.heard += 1  # the second is lost
    >>> here.missed(there.heard)
    [Leave(for_good=False, stops=False)]
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.heard = 0
        """Messages that have come from the other side."""
        self.said = 0
        self.kept: deque[Message] = deque(maxlen=kept)

    def say(self, message: Message) -> None:
        """Keep what is said now."""
        self.said += 1
        self.kept.append(message)

    def missed(self, heard: int) -> list[Message]:
        """Return the messages that the other side, which has heard so many, must be sent again.

        Raises:
            RemoteProtocolError: it has heard more than was said, or so much less that it is kept no more.
        """
        missing = self.said - heard
        if not 0 <= missing <= len(self.kept):
            raise RemoteProtocolError(
                f"{heard} messages are said to have come, of {self.said}; the last {len(self.kept)} are kept"
            )
        return list(self.kept)[len(self.kept) - missing :]


class Caller:
    """A role's side of its link to the coordinator.

    Args:
        endpoint: of the role.
        clock: says when to try again.
        where: the address of the coordinator, as it is known by then.
        hear: is told at last that the coordinator is gone.
    """

    def __init__(
        self, endpoint: Endpoint, clock: Clock, where: Callable[[], str], hear: Callable[[Arrival], None]
    ) -> None:
        self._endpoint, self._clock, self._where, self._hear = endpoint, clock, where, hear
        self._session = Session()
        self.away: float | None = None
        """Since when the coordinator is; None while it is there."""
        self.ended = False
        """True once the role is played no more."""
        self._last = False
        self.then: Callable[[], None] = lambda: None
        """Function called once the coordinator is back, or given up."""
        self._gone = Lost("it is away")

    @property
    def waits(self) -> bool:
        """True while messages are kept for a coordinator that is away."""
        return self.away is not None and not self.ended

    def open(self) -> None:
        """Open the link, at once or as soon as the coordinator is there."""
        if error := self._reach():
            self._seek(Lost(error))

    def _reach(self) -> str:
        """Open the link; returns why it could not be."""
        try:
            self._endpoint.connect(COORDINATOR, self._where())
        except JobFailed as error:
            return str(error)
        return ""

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message; one for a coordinator that is away is kept for it."""
        if to == COORDINATOR:
            self._session.say(message)
            if self.away is not None:
                return
        self._endpoint.send(to, message, payload)

    def takes(self, event: Event) -> bool:
        """Return whether an event from the coordinator is for the role."""
        if type(event) is Lost:
            if not self._last:
                self._seek(event)
            return self._last
        if type(event) is Resumed:
            self._resumed(event.heard)
            return False
        self._session.heard += 1
        return True

    def end_wait(self) -> None:
        """It does not come again."""
        self._last = True
        if self.waits:
            self._give_up()

    def _seek(self, lost: Lost) -> None:
        if self.away is None:
            self.away, self._gone = self._clock.now(), lost
        if self._last:  # that was told while the link was being opened
            self._give_up()
            return
        self._clock.call_later(SEEK_SECONDS, self._try, None)

    def _try(self, _: None) -> None:
        if self.away is None or self.ended:
            return
        if not self._reach():  # whoever listens there answers, or is lost again
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


# An event counts once it stands in the journal, and the coordinator is handed it only then. So the life that comes
# again has heard all that the last one acted on. It counts what it says as it goes through the journal, and sends
# nothing: each role then names what it has heard, and is sent the rest.
class LastingHost:
    """The coordinator's side of the links to all others.

    Args:
        endpoint: of the coordinator.
        machine: that plays it.
        kinds: the classes that what it holds is made of; none where that cannot be told, and it has to be told
            everything again.
        journal: where everything stands that it was told.
        watched: the roles whose deaths the coordinator is told of by whoever has started them.
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
        """True once it had ended: whoever comes back is told so, and it takes nothing more."""

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message; to a life of a role that has said something to the coordinator."""
        incarnation, session = self._sessions.get(to, (-1, None))
        if session is not None:
            session.say(message)
            # one that is away is told when it comes back
            if not self._replays and to not in self._awaited and self._endpoint.incarnation_of(to) == incarnation:
                self._endpoint.send(to, message, payload)

    def takes(self, arrival: Arrival) -> Iterator[Arrival]:
        """Yield the events that the coordinator is handed for an arrival, each once it stands in the journal.

        Raises:
            RemoteProtocolError: a role cannot have heard what it says that it has.
        """
        sender, event = arrival.sender, arrival.event
        incarnation = self._endpoint.incarnation_of(sender) if isinstance(event, Message) else -1
        if self.ended and type(event) is not Resume:
            return
        # the store's answer comes amid the effects of what is noted already
        if self._kinds and self._journal.long and sender != STORE:
            self._journal.begin(self._remember())
        before = self._sessions.get(sender, (incarnation,))[0]
        if before < incarnation and before > self._over.get(sender, -1):  # nobody has told of its death
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
        """Have the coordinator be what it was when its journal was begun, and go through what it was told since.

        At the end, all whom it knew, and who live as far as it knows, are to come back.
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
        """Return the roles, with their lives, that have not come back, and of whose deaths nobody else tells."""
        return [(role, incarnation) for role, incarnation in self._awaited.items() if role not in self._watched]

    def _remember(self) -> bytes:
        sessions = [
            [role, incarnation, one.heard, one.said, list(map(wire.encode, one.kept))]
            for role, (incarnation, one) in self._sessions.items()
        ]
        return msgspec.msgpack.encode(
            [remember(self._machine, self._kinds), sessions, self._over, self.records, self.wakes]
        )

    def _recall(self, held: bytes) -> None:
        machine, sessions, self._over, self.records, wakes = msgspec.msgpack.decode(held)
        recall(machine, self._kinds, self._machine)
        for role, incarnation, heard, said, kept in sessions:
            session = self._session(role, incarnation)
            session.heard, session.said = heard, said
            session.kept.extend(wire.decode(frame[wire.PREFIX.size :]) for frame in kept)
        self.wakes = msgspec.convert(wakes, list[Wake])

    def _count(self, sender: str, incarnation: int, event: Event) -> None:
        """Know that the coordinator was told something, now or in the life before."""
        if isinstance(event, Lost):
            known = self._sessions.get(sender, (-1,))[0]
            self._over[sender] = max(self._over.get(sender, -1), event.incarnation if event.incarnation >= 0 else known)
            if known <= self._over[sender]:  # what was said to it is nobody's any more
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
        if incarnation <= self._over.get(role, -1):
            self._endpoint.send(role, Resumed(-1))
            return
        session = self._session(role, incarnation)
        missed = session.missed(heard)
        self._awaited.pop(role, None)
        self._endpoint.send(role, Resumed(session.heard))
        for message in missed:
            self._endpoint.send(role, message)
