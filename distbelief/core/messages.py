"""What all messages between roles have in common; each conversation has a file of its own in `core/conversations`.

`Bulk` messages carry bytes [start, stop) of a flat vector: a push or an initialisation from the replica's gradient
vector number `slot`, a fetch's answer into its parameter vector number `slot`. How those bytes travel is the
transport's affair.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Version(NamedTuple):
    """How many updates a shard has applied, within one incarnation of the shard."""

    incarnation: int
    updates: int


class Place(NamedTuple):
    """Where one life of a role listens."""

    address: str
    incarnation: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Anything that one role sends another."""


class Bulk(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A message with bytes [start, stop) of a flat vector behind it."""

    slot: int
    start: int
    stop: int
