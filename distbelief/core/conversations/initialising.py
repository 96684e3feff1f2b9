"""Initialising: messages by which shards learn their ranges and get parameters, of a checkpoint or of a replica."""

from __future__ import annotations

from distbelief.core.conversations.membership import Here, Join
from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost
from distbelief.core.messages import Address, Bulk, Message, Version
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan


class Restore(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to hold the shard's range of a plan."""

    plan: Plan
    checkpoint: str
    """Checkpoint to load; "" where a replica will send the parameters."""
    members: tuple[tuple[str, int], ...] = ()
    """Replicas that go on as they were, with their incarnations, where the shard replaces a dead one."""
    ruler: Address = Address("", 0)
    """Address of the shard that rules the rounds."""


class Restored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer of a shard that knows its range."""

    loaded: bool
    """True where it has loaded its parameters."""
    lasts: bool = False
    """True where its parameters outlive its process, so that its death loses nothing."""


class Initialise(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Initial values of a range of the vector."""

    replaces: bool = False
    """True where they replace the shard's values, since the script of the only replica has changed its parameters."""


class Initialised(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer of a shard that holds the values that were sent."""

    version: Version


class Ready(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica that all shards hold the initial parameters."""

    shards: tuple[int, ...]
    """Incarnation of each shard."""


class ShardStanding(TextEnum):
    """State of a shard, as the coordinator knows it."""

    AWAY = "away"
    HERE = "here"
    TOLD = "told"
    READY = "ready"


SHARD = States(
    "a shard",
    {
        ShardStanding.AWAY: "it is not there",
        ShardStanding.HERE: "it is there",
        ShardStanding.TOLD: "it is told its range",
        ShardStanding.READY: "it holds its range",
    },
    (
        Transition(ShardStanding.AWAY, ShardStanding.HERE, (Here,)),
        Transition(ShardStanding.HERE, ShardStanding.TOLD, (Here, Join)),
        Transition(ShardStanding.TOLD, ShardStanding.READY, (Restored,)),
        # news of a role's next life may come before that of its last death
        Transition(ShardStanding.TOLD, ShardStanding.HERE, (Here,)),
        Transition(ShardStanding.READY, ShardStanding.HERE, (Here,)),
        Transition(ShardStanding.HERE, ShardStanding.AWAY, (Lost,)),
        Transition(ShardStanding.TOLD, ShardStanding.AWAY, (Lost,)),
        Transition(ShardStanding.READY, ShardStanding.AWAY, (Lost,)),
    ),
)

INITIALISING = Conversation(
    "Initialising",
    (
        Says(Restore, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Restored, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Restore),
        Says(Initialise, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Initialised, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=Initialise),
        Says(Ready, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
    ),
    (SHARD,),
)
