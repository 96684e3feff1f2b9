"""What the machines have in common: each takes the events that it has an answer to, from the roles that have a say in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distbelief.core import speakers
from distbelief.core.effects import Effect, Payload
from distbelief.core.events import Event
from distbelief.errors import RemoteProtocolError


class Answers:
    """The answers of one machine.

    Args:
        who: the machine, as an error names it.
        by_kind: its answer to each kind of event.
        may_say: the roles that have a say in each.
    """

    forgotten = True
    """They are the same in every machine of a kind, and no part of its memory."""

    def __init__(self, who: str, by_kind: dict[type, Callable[..., Any]], may_say: Mapping[type, tuple[str, ...]] = speakers.SPEAKERS) -> None:
        self._who, self.by_kind = who, by_kind
        self._door = speakers.Doorkeeper(may_say)

    def to(self, sender: str, event: Event) -> Callable[..., Any]:
        """The answer to an event.

        Raises:
            RemoteProtocolError: there is none, or the sender has no say in it.
        """
        self._door.check(sender, type(event))
        answer = self.by_kind.get(type(event))
        if answer is None:
            raise RemoteProtocolError(f"{self._who} has no answer to {type(event).__name__}")
        return answer


class Answering:
    """A machine that needs no payloads."""

    _answers: Answers

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
        return self._answers.to(sender, event)(sender, event)  # type: ignore[no-any-return]
