"""Common parts of all messages between roles, and all that a transport must know of them. That is: which have bytes
behind them, from where and to where, as what these are counted, and who opens a link. Each conversation has a file of
its own in `core/conversations`, which no transport reads.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

from distbelief.core.records import BytesCounted

KINDS = PUSH, FETCH, ALL_REDUCE, PARTITIONS, CONTROL = ("push", "fetch", "all_reduce", "partitions", "control")
"""Purposes of bytes: gradients to the shards, parameters that a fetch asked for, sums of gradients, what crosses
between the partitions of a replica, and all else.
"""
WAYS = ("sent", "received", "shared_memory")


class Version(NamedTuple):
    """Number of updates that a shard has applied, within one incarnation of the shard."""

    incarnation: int
    updates: int


class Address(NamedTuple):
    """Place at which one life of a role listens."""

    address: str
    incarnation: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Anything that one role sends another."""

    traffic: ClassVar[str] = CONTROL
    """The kind as which its bytes are counted, with those behind it."""


class Bulk(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A message with bytes [start, stop) of a flat vector behind it: those of the sender's gradient vector number
    `slot`, which the receiver reads where they lie.
    """

    asked: ClassVar[bool] = False
    """True for a `SlotReply`."""

    slot: int
    start: int
    stop: int


class SlotRequest(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Asks for bytes [start, stop), into the asker's parameter vector number `slot`."""

    slot: int
    start: int
    stop: int


class SlotReply(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """The bytes that a `SlotRequest` asked for: they lie in the asker's slot when it is delivered, and are the
    sender's, which goes on to write to them, until then.
    """

    asked: ClassVar[bool] = True


class Hello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message on a link: a role, its job, and the vectors that it lends. Of these their length in bytes, how many
    of gradients and of parameters, and the byte of the flat vector at which they begin.
    """

    job: str
    role: str
    incarnation: int
    size: int = 0
    gradients: int = 0
    parameters: int = 0
    peer: int = -1
    """The incarnation of the other end that is meant; -1 for whichever is there."""
    start: int = 0


class Traffic:
    """The bytes that one carrier of a role has sent, received, and read in memory that roles share, by kind; one thread
    writes them.

    They are counted where they leave and where they arrive, as the kernel counts what is in its packets: frames with
    their payloads, and of TLS its handshakes and the ends of its records. What one reads where another has written it
    is sent by nobody, and is counted by who reads it.

    >>> traffic = Traffic()
    >>> traffic.sent[PUSH] += 100
    >>> traffic.tell("replica 0"), traffic.tell("replica 0")
    (BytesCounted(role='replica 0', sent={'push': 100}, received={}, shared_memory={}), None)
    """

    __slots__ = ("_told", "received", "sent", "shared_memory")

    def __init__(self) -> None:
        self.sent = dict.fromkeys(KINDS, 0)
        self.received = dict.fromkeys(KINDS, 0)
        self.shared_memory = dict.fromkeys(KINDS, 0)
        """Bytes that were read there."""
        self._told = {way: dict.fromkeys(KINDS, 0) for way in WAYS}

    def tell(self, role: str) -> BytesCounted | None:
        """Return the counts since the last call; None where there are none."""
        new = {way: self._new(getattr(self, way), self._told[way]) for way in WAYS}
        return BytesCounted(role, **new) if any(new.values()) else None

    @staticmethod
    def _new(counted: dict[str, int], reported: dict[str, int]) -> dict[str, int]:
        new = {kind: more for kind in KINDS if (more := counted[kind] - reported[kind])}
        for kind, more in new.items():
            reported[kind] += more
        return new
