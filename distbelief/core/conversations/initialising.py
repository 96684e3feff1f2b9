"""Initialising: the messages by which the shards are told their ranges, and come to hold parameters: of a checkpoint, or of the first replica."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Bulk, Message, Place, Version
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan


class Restore(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Hold this range of this plan; `checkpoint` names what to load it from, or is empty where a replica will send it.

    `members` go on as they were, at a shard that takes the place of one that died; none do where all begin anew from the checkpoint.
    """

    plan: Plan
    checkpoint: str
    members: tuple[tuple[str, int], ...] = ()
    """Replicas, and which life of each."""
    ruler: Place = Place("", 0)
    """Where the shard that rules the rounds is."""


class Restored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard knows its range; `loaded` where it also holds parameters."""

    loaded: bool


class Initialise(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """The initial values of a range of the vector."""


class Initialised(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard holds the range that was sent."""

    version: Version


class Ready(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shards, of these incarnations, hold the initial parameters that this replica sent them."""

    shards: tuple[int, ...]


INITIALISING = Conversation(
    "Initialising",
    (
        Says(Restore, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Restored, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Restore),
        Says(Initialise, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Initialised, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=Initialise),
        Says(Ready, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
    ),
)
