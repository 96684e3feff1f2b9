"""Initialising: the messages by which the shards are told their ranges, and come to hold parameters: of a checkpoint,
or of the first replica.
"""

from __future__ import annotations

from distbelief.core.conversations.membership import Here, Join
from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost
from distbelief.core.messages import Address, Bulk, Message, Version
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan


class Restore(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to hold a range of this plan; `checkpoint` names what to load, or is empty where a replica sends it.

    `members` go on as they were, at a shard that takes the place of one that died; none do where all begin anew from
    the checkpoint.
    """

    plan: Plan
    checkpoint: str
    members: tuple[tuple[str, int], ...] = ()
    """Replicas, and which life of each."""
    ruler: Address = Address("", 0)
    """Address of the shard that rules the rounds."""


class Restored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that a shard knows its range; `loaded` where it holds parameters too."""

    loaded: bool
    lasts: bool = False
    """True where its parameters outlive its process: its death loses nothing."""


class Initialise(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Initial values of a range of the vector."""

    replaces: bool = False
    """True where these values replace the shard's: the script of the only replica has written to its parameters."""


class Initialised(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that the shard holds that range."""

    version: Version


class Ready(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that these lives of the shards hold the initial parameters of this replica."""

    shards: tuple[int, ...]


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
        ShardStanding.READY: "it holds what it is to hold",
    },
    (
        Transition(ShardStanding.AWAY, ShardStanding.HERE, (Here,)),
        Transition(ShardStanding.HERE, ShardStanding.TOLD, (Here, Join)),
        Transition(ShardStanding.TOLD, ShardStanding.READY, (Restored,)),
        Transition(
            ShardStanding.TOLD, ShardStanding.HERE, (Here,)
        ),  # its next life, which is heard of before the death of the last
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
