"""Links to the coordinator that last: when it dies and comes again, both sides go on where they were, and nothing is missed or heard twice.

A role that has lost its link keeps what it says, and opens the link again as soon as somebody listens there. The coordinator that has come again has
gone through its journal, so that it knows what each has told it, and what it has told each. Then each tells the other how much it has heard,
and is told the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from distbelief.core.effects import Arrival, Payload
from distbelief.core.events import Event, Lost
from distbelief.core.messages import Message
from distbelief.core.roles import COORDINATOR
from distbelief.core.session import Session
from distbelief.core.upkeep import Resume, Resumed
from distbelief.errors import JobFailed, RemoteProtocolError
from distbelief.record.journal import Entry, Journal
from distbelief.runtime.clock import Clock
from distbelief.transport.base import Endpoint

SEEK_SECONDS = 0.1
"""Between two tries to reach a coordinator that is away."""
AWAY_SECONDS = 20.0
"""How long it may be away."""
RETURN_SECONDS = 10.0
"""How long a coordinator that has come again waits for those whom it knew."""


class Caller:
    """A role's side of its link to the coordinator.

    Args:
        endpoint: of the role.
        clock: says when to try again.
        where: the address of the coordinator, as it is known by then.
        hear: is told at last that the coordinator is gone.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock, where: Callable[[], str], hear: Callable[[Arrival], None]) -> None:
        self._endpoint, self._clock, self._where, self._hear = endpoint, clock, where, hear
        self._session = Session()
        self.away: float | None = None
        """Since when the coordinator is; None while it is there."""
        self.ended = False
        """Whether the role is played no more."""
        self._gone = Lost("it is away")

    def open(self) -> None:
        """Open the link, at once or as soon as the coordinator is there."""
        try:
            self._endpoint.connect(COORDINATOR, self._where())
        except JobFailed as error:
            self._seek(Lost(str(error)))

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message; one for a coordinator that is away is kept for it."""
        if to == COORDINATOR:
            self._session.say(message)
            if self.away is not None:
                return
        self._endpoint.send(to, message, payload)

    def takes(self, event: Event) -> bool:
        """Whether what comes from the coordinator is for the role."""
        if type(event) is Lost:
            self._seek(event)
            return False
        if type(event) is Resumed:
            self._resumed(event.heard)
            return False
        self._session.heard += 1
        return True

    def _seek(self, lost: Lost) -> None:
        if self.away is None:
            self.away, self._gone = self._clock.now(), lost
            self._clock.call_later(AWAY_SECONDS, self._give_up, self.away)
        self._clock.call_later(SEEK_SECONDS, self._try, None)

    def _try(self, _: None) -> None:
        if self.ended or self.away is None:
            return
        try:
            self._endpoint.connect(COORDINATOR, self._where())
        except JobFailed:
            self._clock.call_later(SEEK_SECONDS, self._try, None)
        else:
            self._endpoint.send(COORDINATOR, Resume(self._session.heard))

    def _resumed(self, heard: int) -> None:
        try:
            if heard < 0:
                raise RemoteProtocolError("it goes on without this life of the role")
            missed = self._session.missed(heard)
        except RemoteProtocolError as error:
            self._gone = Lost(str(error))
            self._give_up(self.away)
            return
        self.away = None
        for message in missed:
            self._endpoint.send(COORDINATOR, message)

    def _give_up(self, since: float | None) -> None:
        if not self.ended and self.away == since:
            self.ended = True
            self._hear(Arrival(COORDINATOR, self._gone))


class Host:
    """The coordinator's side of the links to all others.

    Args:
        endpoint: of the coordinator.
        journal: where everything stands that it was told.
    """

    def __init__(self, endpoint: Endpoint, journal: Journal) -> None:
        self._endpoint, self.journal = endpoint, journal
        self._sessions: dict[str, tuple[int, Session]] = {}
        self._over: dict[str, int] = {}
        self._awaited: dict[str, int] = {}
        self._replays = False

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message."""
        if (known := self._sessions.get(to)) is not None:
            known[1].say(message)
        if not self._replays and to not in self._awaited:  # else it is told when it comes back
            self._endpoint.send(to, message, payload)

    def takes(self, arrival: Arrival) -> bool:
        """Whether something is for the coordinator, in whose journal it stands then.

        Raises:
            RemoteProtocolError: a role cannot have heard what it says that it has.
        """
        sender, event = arrival.sender, arrival.event
        life = self._endpoint.life_of(sender) if isinstance(event, Message) else -1
        if type(event) is Resume:
            self._resume(sender, life, event.heard)
            return False
        self.journal.note(sender, life, event)
        self._count(sender, life, event)
        return True

    def _count(self, sender: str, life: int, event: Event) -> None:
        """Know that the coordinator was told something, now or in the life before."""
        if isinstance(event, Lost):
            known = self._sessions.get(sender, (-1,))[0]
            self._over[sender] = max(self._over.get(sender, -1), event.incarnation if event.incarnation >= 0 else known)
            if sender in self._awaited and self._awaited[sender] <= self._over[sender]:
                del self._awaited[sender]
        elif life >= 0:
            self._session(sender, life).heard += 1

    def replay(self) -> Iterator[Entry]:
        """What stands in the journal; at its end all whom it knew, and who live as far as it knows, are to come back."""
        self._replays = True
        for entry in self.journal.entries():
            self._count(*entry)
            yield entry
        self._replays = False
        self._awaited = {role: life for role, (life, _) in self._sessions.items() if life > self._over.get(role, -1)}

    def missing(self) -> list[tuple[str, int]]:
        """Who has not come back, and which life of it."""
        return list(self._awaited.items())

    def _session(self, role: str, life: int) -> Session:
        known = self._sessions.get(role)
        if known is None or known[0] != life:
            known = self._sessions[role] = (life, Session())
            self._awaited.pop(role, None)
        return known[1]

    def _resume(self, role: str, life: int, heard: int) -> None:
        if life <= self._over.get(role, -1):
            self._endpoint.send(role, Resumed(-1))
            return
        session = self._session(role, life)
        missed = session.missed(heard)
        self._awaited.pop(role, None)
        self._endpoint.send(role, Resumed(session.heard))
        for message in missed:
            self._endpoint.send(role, message)
