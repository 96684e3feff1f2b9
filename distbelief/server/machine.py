"""Common part of the machines: each takes events that it has an answer to, from roles that have a say in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distbelief.core import roles
from distbelief.core.effects import Effect, Payload
from distbelief.core.events import Event
from distbelief.core.roles import Kind
from distbelief.errors import LocalProtocolError, RemoteProtocolError


class Answers:
    """The answers of one machine.

    Args:
        who: the machine, as an error names it.
        heard: kinds of senders of each event, by the tables of the conversations (`core/protocol`).
        by_event: its answer to each kind of event.

    Raises:
        LocalProtocolError: it answers an event that no table lets it hear.
    """

    forgotten = True
    """True: answers are the same in every machine of a kind, and no part of its memory."""

    def __init__(
        self, who: str, heard: Mapping[type, tuple[Kind, ...]], by_event: Mapping[type, Callable[..., list[Effect]]]
    ) -> None:
        self._who, self._heard, self._by_event = who, heard, by_event
        self._senders: dict[type, set[str]] = {event: set() for event in by_event}
        """Roles that have sent an event of each kind, and had a say in it."""
        if untold := by_event.keys() - heard.keys():
            raise LocalProtocolError(
                f"{who} answers {', '.join(sorted(kind.__name__ for kind in untold))}, which no table lets it hear"
            )

    def to(self, sender: str, event: type) -> Callable[..., list[Effect]]:
        """Return the answer to a kind of event from a sender.

        Raises:
            RemoteProtocolError: there is none, or the sender has no say in it.
        """
        if sender not in self._senders.get(event, ()):  # its kind is looked up once, not with every push
            self._admit(sender, event)
        return self._by_event[event]

    def _admit(self, sender: str, event: type) -> None:
        if event not in self._by_event:
            raise RemoteProtocolError(f"{self._who} has no answer to {event.__name__}")
        if roles.kind(sender) not in self._heard[event]:
            raise RemoteProtocolError(
                f"{sender} has no say in {event.__name__}; it is for {', '.join(self._heard[event])}"
            )
        self._senders[event].add(sender)


class Answering:
    """A machine whose answers need no payloads."""

    def validate(self) -> None:
        """Assert what holds between two events."""

    _answers: Answers

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
        return self._answers.to(sender, type(event))(sender, event)
