"""The channel between a process of a job and its supervisor: what is said on it, and its two ends."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from distbelief.core import records, roles
from distbelief.core.conversations import membership
from distbelief.core.events import Event, Lost

MESSAGE_LIMIT = 1 << 24
"""Longest message on a channel, in bytes."""
TEXT_LIMIT = 8000
"""Longest text of a failure, in characters: a word that is written in one piece is never half there."""


class Word(msgspec.Struct, frozen=True, tag=True):
    """Anything that is said on a channel."""


class Listening(Word, frozen=True, tag=True):
    """The coordinator listens at an address: it says so, and all others are told."""

    address: str


class Noted(Word, frozen=True, tag=True):
    """A role recorded something at a moment of the machine's monotonic clock."""

    moment: float
    role: str
    record: records.Any


class Failed(Word, frozen=True, tag=True):
    """A role failed with an error of `distbelief.errors`, or another (`kind` ""); `trace` is the traceback of what the user's code raised."""

    kind: str
    text: str
    trace: str = ""


class Over(Word, frozen=True, tag=True):
    """The process has played its role to the end: without this word it died, whatever its status."""


class Interrupt(Word, frozen=True, tag=True):
    """End the job in peace: the person who runs it wants it to."""

    reason: str


class Died(Word, frozen=True, tag=True):
    """The process of a role has ended: this life of it."""

    role: str
    reason: str
    incarnation: int
    left: bool = False
    """Whether it had played its role to the end."""

    @property
    def event(self) -> Event:
        """What the coordinator is told."""
        return membership.Leave(for_good=True) if self.left and roles.is_replica(self.role) else Lost(self.reason, self.incarnation)


class Explain(Word, frozen=True, tag=True):
    """Note what the job waits for."""


class Ask(Word, frozen=True, tag=True):
    """Say how you stand."""


class Standing(Word, frozen=True, tag=True):
    """How a role stands: what it does, what it waits for and for how many seconds by now, and its counts.

    `facts` may hold "of": what this role knows of others, by role.
    """

    role: str
    state: str
    waits_for: str
    waited: float | None
    facts: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_WORDS = Listening | Noted | Failed | Over | Interrupt | Died | Explain | Ask | Standing
_decode: Callable[[bytes], Word] = msgspec.msgpack.Decoder(_WORDS).decode


class Channel:
    """One end of a channel. Only bytes are sent on the connection, never a pickle."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def say(self, word: Word) -> None:
        """Send a word; to a peer that is gone, nothing."""
        if isinstance(word, Failed) and len(word.text) > TEXT_LIMIT:
            word = Failed(word.kind, "..." + word.text[-TEXT_LIMIT:])
        try:
            self.connection.send_bytes(_encode(word))
        except (BrokenPipeError, ConnectionResetError):
            return

    def hear(self) -> Word | None:
        """The next word; None when the other end is gone, be it in the middle of a word."""
        try:
            return _decode(self.connection.recv_bytes(MESSAGE_LIMIT))
        except (EOFError, OSError):
            return None

    def hear_all(self, take: Callable[[Word], None]) -> bool:
        """Hand over every word that is here; False when the other end is gone."""
        while self.connection.poll():
            word = self.hear()
            if word is None:
                return False
            take(word)
        return True
