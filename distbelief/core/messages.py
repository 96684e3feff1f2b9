"""Messages between roles: what a transport must know about them.

A transport knows which messages carry bytes, from where to where, as what kind these are counted, and which role opens
a link. Each conversation has a file of its own in `core/conversations`, which no transport reads.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, NamedTuple

import msgspec

from distbelief.core.records import BytesCounted

KINDS = PUSH, FETCH, ALL_REDUCE, PARTITIONS, CONTROL = ("push", "fetch", "all_reduce", "partitions", "control")
"""Kinds of traffic: gradients, fetched parameters, sums of gradients, tensors between partitions, the rest."""
WAYS = ("sent", "received", "shared_memory")


class Version(NamedTuple):
    """Number of updates that a shard has applied, and the shard's incarnation."""

    incarnation: int
    updates: int


class Address(NamedTuple):
    """Address at which an incarnation of a role listens."""

    address: str
    incarnation: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Message from one role to another."""

    traffic: ClassVar[str] = CONTROL
    """Kind as which its bytes count, with its payload's."""


class Bulk(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Message with bytes [start, stop) of the sender's gradient vector `slot`, which the receiver reads in place."""

    is_reply: ClassVar[bool] = False
    """True for a `SlotReply`."""

    slot: int
    start: int
    stop: int


class SlotRequest(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request for bytes [start, stop), into the sender's parameter vector `slot`."""

    slot: int
    start: int
    stop: int


class SlotReply(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to a `SlotRequest`: when it is delivered, its bytes are in the slot of the role that asked."""

    is_reply: ClassVar[bool] = True


class Hello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message on a link: the role that opens it, its job, and the vectors that it lends."""

    job: str
    role: str
    incarnation: int
    size: int = 0
    """Length of each vector in bytes."""
    gradients: int = 0
    """Number of gradient vectors."""
    parameters: int = 0
    """Number of parameter vectors."""
    peer: int = -1
    """Incarnation of the role at the other end; -1 for any."""
    start: int = 0
    """Byte of the flat vector at which each of them begins."""


class Traffic:
    """Bytes that a carrier of a role has sent, received and read in shared memory, by kind; one thread writes them.

    They are the contents of packets as the kernel counts them: frames with payloads, and TLS's handshakes and record
    ends. Bytes in shared memory are not sent; the reader counts them.

    >>> traffic = Traffic()
    >>> traffic.sent[PUSH] += 100
    >>> traffic.tell("replica 0"), traffic.tell("replica 0")
    (BytesCounted(role='replica 0', sent={'push': 100}, received={}, shared_memory={}), None)
    """

    __slots__ = ("_reported", "received", "sent", "shared_memory")

    def __init__(self) -> None:
        self.sent = dict.fromkeys(KINDS, 0)
        self.received = dict.fromkeys(KINDS, 0)
        self.shared_memory = dict.fromkeys(KINDS, 0)
        self._reported = {way: Counter[str]() for way in WAYS}

    def tell(self, role: str) -> BytesCounted | None:
        """Return the counts since the last call; None where there are none."""
        counted = {way: Counter[str](getattr(self, way)) for way in WAYS}
        new = {way: dict(counted[way] - self._reported[way]) for way in WAYS}
        self._reported = counted
        return BytesCounted(role, **new) if any(new.values()) else None
