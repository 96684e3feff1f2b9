"""Attendance: the messages by which shards know which replicas take part."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Attend(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica takes part from `tick` on, or asks from where on (-1)."""

    incarnation: int
    tick: int
    epoch: int = 0
    """The epoch of its minibatches."""


class Admitted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The tick from which on a replica takes part here."""

    tick: int


class SitOut(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has no more minibatches of an epoch, and is not to be waited for; in rounds, until the next begins."""

    incarnation: int
    epoch: int


class Excused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica sits out here: nobody waits for it, and what it pushed is in the parameters or in a round."""


class Return(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has reached the next life of a shard that died, which had acknowledged its pushes up to `clock`; those
    that it had not come again.
    """

    incarnation: int
    clock: int
    partition: int = 0
    """Partition of the replica; 0 where it is whole."""


class Departed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has died or left; it may never have had a link to this shard. Back from the shard that rules: what it
    pushed is in no round to come.
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
