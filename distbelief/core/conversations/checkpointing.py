"""Checkpointing: the messages by which replicas hold their pushes, and shards save what they hold and account for it."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message, Version
from distbelief.core.roles import Kind


class Hold(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Checkpoint `number` is to be made: compute, but push nothing until you may go on, and say when all that you pushed is applied."""

    number: int


class Held(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Every push of this replica is applied and reported, and it makes none until checkpoint `number` is made."""

    number: int


class Snapshot(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Save your slice as part of checkpoint `number`."""

    number: int


class SnapshotDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard's part of a checkpoint is on disk, or the error that kept it from there."""

    number: int
    error: str


class Go(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The checkpoint is made: go on pushing."""


class Describe(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Tell what you have applied."""


class Description(Message, frozen=True, array_like=True, tag=True, gc=False):
    """What a shard has applied: updates, and how many pushes had each staleness."""

    version: Version
    samples: int
    staleness: dict[int, int]


CHECKPOINTING = Conversation(
    "Checkpointing",
    (
        Says(Hold, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Held, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Hold),
        Says(Snapshot, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(SnapshotDone, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Snapshot),
        Says(Go, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Describe, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Description, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Describe),
    ),
)
