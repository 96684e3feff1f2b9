"""Events: inputs of roles. Messages come from other roles; those below from a role's own transport, store or clock.

A timer is the reason for which a role asks its clock to wake it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from distbelief.core.messages import Message
from distbelief.core.records import Json
from distbelief.core.roles import Kind


class Timer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reason for a wake-up."""


class CheckpointDue(Timer, frozen=True, array_like=True, tag=True):
    """Time for a checkpoint."""


class BudgetSpent(Timer, frozen=True, array_like=True, tag=True):
    """End of a job's budget of time."""


class HoldOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for replicas that are to hold their pushes."""

    number: int
    """Number of the hold."""


class ScriptOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for a replica that is to save its script's state."""

    number: int
    """Number of the checkpoint."""


class DoubtOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for news of a shard's death, after a replica has lost its link to the shard."""

    shard: str
    incarnation: int


class GuestsOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for guests of a job that is over."""


class BucketDue(Timer, frozen=True, array_like=True, tag=True):
    """Moment at which a simulated step has the gradients of a bucket."""

    group: int
    round: int
    bucket: int


class PartedOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for a partition whose link to another is gone."""

    role: str


AnyTimer = CheckpointDue | BudgetSpent | HoldOver | ScriptOver | DoubtOver | GuestsOver | BucketDue | PartedOver
"""Every timer."""


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
    seconds: float = 0.0
    """Time that it took."""


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
