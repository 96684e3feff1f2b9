"""What all messages between roles have in common, and what a transport must know of them: which have bytes behind them,
from where and to where, and who opens a link. Each conversation has a file of its own in `core/conversations`, which no
transport reads.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

from distbelief.core.traffic import CONTROL


class Version(NamedTuple):
    """How many updates a shard has applied, within one incarnation of the shard."""

    incarnation: int
    updates: int


class Address(NamedTuple):
    """Where one life of a role listens."""

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
    """Whether it is a `SlotReply`."""

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
    """Who opens this link, of which job, and the vectors it lends: their length in bytes, how many of gradients and of
    parameters, and the byte of the flat vector at which they begin.
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
