"""Attendance: the messages by which shards know which replicas take part."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Attend(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a replica takes part from `tick` on. With -1 it asks from which on it may."""

    incarnation: int
    tick: int
    epoch: int = 0
    """The epoch of its minibatches."""


class Admitted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Tick from which on a replica takes part."""

    tick: int


class SitOut(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a replica has no minibatch left in an epoch, so that nobody waits for it. In rounds that holds until
    the next epoch.
    """

    incarnation: int
    epoch: int


class Excused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that nobody waits for a replica, and that what it pushed counts."""


class Return(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Last `clock` that a shard had acknowledged in the life before. The replica pushes again what comes after."""

    incarnation: int
    clock: int
    partition: int = 0
    """Partition of the replica; 0 where it is whole."""


class Departed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a replica is gone; from the shard that rules, that no round to come has a push of it. The replica may
    never have had a link to the shard.
    """

    who: str
    incarnation: int


ATTENDANCE = Conversation(
    "Attendance",
    (
        Says(Attend, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Admitted, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=Attend),
        Says(SitOut, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Excused, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=SitOut),
        Says(Return, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Departed, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Departed, by=(Kind.SHARD,), to=(Kind.COORDINATOR,)),
    ),
)
