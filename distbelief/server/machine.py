"""Common part of the machines: each event has one handler, and comes only from the roles that its table names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distbelief.core import roles
from distbelief.core.effects import Effect
from distbelief.core.roles import Kind
from distbelief.errors import LocalProtocolError, RemoteProtocolError

Handlers = Mapping[type, Callable[..., list[Effect]]]
"""Handler of each kind of event; it takes the sender, the event, and the payload where the machine takes payloads."""


class Answers:
    """Handlers of one machine.

    Args:
        who: name of the machine in errors.
        heard: kinds of senders of each event, by the tables of the conversations (`core/protocol`).
    """

    forgotten = True
    """True: all machines of a kind have the same handlers, which are no part of a machine's memory."""

    def __init__(self, who: str, heard: Mapping[type, tuple[Kind, ...]], by_event: Handlers) -> None:
        self._who, self._heard, self._by_event = who, heard, by_event
        self._senders: dict[type, set[str]] = {event: set() for event in by_event}
        """Roles from which each kind of event was admitted."""
        if untold := by_event.keys() - heard.keys():
            raise LocalProtocolError(
                f"{who} answers {', '.join(sorted(kind.__name__ for kind in untold))}, which no table sends to it"
            )

    def to(self, sender: str, event: type) -> Callable[..., list[Effect]]:
        """Return the handler of an event; refuse one that the machine does not take from this sender."""
        if sender not in self._senders.get(event, ()):  # once for each sender: a push must not wait for look-ups
            self._admit(sender, event)
        return self._by_event[event]

    def _admit(self, sender: str, event: type) -> None:
        if event not in self._by_event:
            raise RemoteProtocolError(f"{self._who} does not take {event.__name__}")
        if roles.kind(sender) not in self._heard[event]:
            raise RemoteProtocolError(
                f"{sender} may not send {event.__name__}; it is for {', '.join(self._heard[event])}"
            )
        self._senders[event].add(sender)
