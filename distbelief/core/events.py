"""Events: everything a role may be told. Messages come from other roles; what stands here comes from its own transport
or store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from distbelief.core.messages import Message
from distbelief.core.records import Json
from distbelief.core.roles import Kind
from distbelief.core.timers import AnyTimer


class Lost(msgspec.Struct, frozen=True, gc=False):
    """From the transport: the link to a peer is gone. `incarnation` is the peer's, where it is known; -1 is whichever
    it was.
    """

    reason: str
    incarnation: int = -1


class Saved(msgspec.Struct, frozen=True, gc=False):
    """From the store beside a machine: what became of a `Save`, `Commit` or `Discard`."""

    number: int
    error: str
    checkpoint: str = ""
    """Path of a checkpoint that was committed."""


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """From the store beside a machine: a shard's part of a checkpoint."""

    arrays: dict[str, Any]
    facts: Json


class Lent(msgspec.Struct, frozen=True, gc=False):
    """From the transport beside a machine: the vectors of a `Lend`; none where payloads are phantoms."""

    vectors: tuple[Any, ...]


class Woke(msgspec.Struct, frozen=True, gc=False):
    """From the clock beside a machine: the time of a `Wake` has come."""

    timer: AnyTimer


TELLERS: Mapping[type, Kind] = {Saved: Kind.STORE, Loaded: Kind.STORE, Woke: Kind.CLOCK, Lent: Kind.CARRIER}
"""Kinds of those beside a role that send it each of these; `Lost` comes in the name of the peer."""

Event = Message | Lost | Saved | Loaded | Lent | Woke
"""Everything a role may be told."""
