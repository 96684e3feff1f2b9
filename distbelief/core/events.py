"""Events: inputs of roles. Messages come from other roles; the events below from a role's own transport and store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from distbelief.core.messages import Message
from distbelief.core.records import Json
from distbelief.core.roles import Kind
from distbelief.core.timers import AnyTimer


class Lost(msgspec.Struct, frozen=True, gc=False):
    """Loss of the link to a peer, from the transport; `incarnation` is the peer's, -1 where unknown."""

    reason: str
    incarnation: int = -1


class Saved(msgspec.Struct, frozen=True, gc=False):
    """Answer of the store to a `Save`, `Commit` or `Discard`."""

    number: int
    error: str
    checkpoint: str = ""
    """Path of the checkpoint, once committed."""


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """Answer of the store to a `Load`: a shard's part of a checkpoint."""

    arrays: dict[str, Any]
    facts: Json


class Lent(msgspec.Struct, frozen=True, gc=False):
    """Answer of the transport to a `Lend`: its vectors; none where payloads are phantoms."""

    vectors: tuple[Any, ...]


class Woke(msgspec.Struct, frozen=True, gc=False):
    """Answer of the clock to a `Wake`, after its time."""

    timer: AnyTimer


TELLERS: Mapping[type, Kind] = {Saved: Kind.STORE, Loaded: Kind.STORE, Woke: Kind.CLOCK, Lent: Kind.CARRIER}
"""Sender of each of these events; `Lost` comes in the peer's name."""

Event = Message | Lost | Saved | Loaded | Lent | Woke
"""Every input of a role."""
