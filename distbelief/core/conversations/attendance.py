"""Attendance: messages by which shards know which replicas take part."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Attend(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica that takes part from `tick` on (-1: the shard chooses)."""

    incarnation: int
    tick: int
    epoch: int = 0
    """Epoch of its minibatches."""


class Admitted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Tick from which on a replica takes part at this shard."""

    tick: int


class SitOut(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica without minibatches of an epoch, which is not waited for; in rounds, until the next epoch."""

    incarnation: int
    epoch: int


class Excused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to `SitOut`: the replica is not waited for, and its pushes are in the parameters or in a round."""


class Return(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report to a restarted shard: the one before had acknowledged pushes up to `clock`."""

    incarnation: int
    clock: int
    partition: int = 0
    """Partition of the replica; 0 where it is whole."""


class Departed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """End of a replica; the ruling shard answers with it once no coming round can hold that replica's pushes."""

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
