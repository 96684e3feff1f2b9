"""Grouping: the messages by which replicas that reduce their gradients among themselves form a group, and go on with it
or without some of it.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from distbelief.core.conversations.agreement import Squares
from distbelief.core.conversations.checkpointing import Describe, Description, Snapshot, SnapshotDone
from distbelief.core.conversations.evaluating import Evaluate, Evaluated
from distbelief.core.conversations.initialising import Restored
from distbelief.core.conversations.membership import PartPlace
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import ALL_REDUCE, Address, Bulk, Message
from distbelief.core.roles import Kind, at_partition
from distbelief.core.settings import Plan

NOTHING = -2
"""The rounds of a replica that holds nothing yet."""


class Member(NamedTuple):
    """One replica of a group; of a split one, the partition that leads."""

    role: str
    place: Address
    needs: bool
    """True where it lacks the parameters with which the group begins."""
    store: str
    """Address, in the terms of its carrier: others reach there what adds up its gradients, or the group of which it is
    the first member meets there.
    """
    parts: tuple[PartPlace, ...] = ()
    """The partitions that follow, in their order."""


def column(members: tuple[Member, ...], partition: int) -> tuple[Member, ...]:
    """The same partition of each member: those add up the gradients of their part among themselves.

    >>> pair = (Member("replica 0.0", Address("unix:@a", 0), False, "", (PartPlace(Address("unix:@b", 0), ""),)),)
    >>> column(pair, 1)[0].role, column(pair, 1)[0].place.address
    ('replica 0.1', 'unix:@b')
    """
    places = [member.parts[partition - 1] for member in members]
    return tuple(
        Member(at_partition(member.role, partition), part.place, member.needs, part.store)
        for member, part in zip(members, places, strict=True)
    )


# replica to coordinator


class Halted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica takes part in no group any more; it has made so many rounds."""

    group: int
    rounds: int


class Broken(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica cannot go on in its group, though it may be that nobody has died."""

    group: int
    reason: str


# coordinator to replica


class Halt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Leave your group in the middle of whatever it is, and say how far you are: group `group` is to be formed."""

    group: int


class Assemble(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Form a group that has made so many rounds; member `source` gives those that need it what it holds, from a
    checkpoint where one is named.
    """

    group: int
    plan: Plan
    members: tuple[Member, ...]
    source: int
    rounds: int
    samples: int
    checkpoint: str = ""


# partition to partition of one replica: beside these, the lead is to the others what the coordinator is to it


class PartSquares(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Squared norms that a partition's parts of cut layers add to a round; back from the lead, before any makes the
    update, their sums over all partitions.
    """

    generation: int
    exchange: int
    """Number of this exchange of such messages since then."""
    of: Squares


class PartValues(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A partition's part of the flat vector, from byte `start` on, for its lead to measure the whole; `left` messages
    come after this one.
    """

    group: int
    start: int
    left: int
    data: bytes


# replica to replica


class AskReceipt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Say when you have taken what was sent before this: there is more, which is not to pile up on its way."""

    number: int


class Receipt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """All that was sent before the `AskReceipt` of this number is taken."""

    number: int


class GroupHello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A member opens a link to another of its group: the first thing on it, so that the other can use it."""

    group: int


class ReducedPiece(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Some elements of a bucket, from byte `start` of the flat vector on, at a step of its schedule in a round."""

    traffic: ClassVar[str] = ALL_REDUCE

    group: int
    round: int
    bucket: int
    step: int
    start: int
    adds: bool
    data: bytes = b""


class ReducedChunk(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Some elements of a vector, from element `first` on, at a step of its schedule: chunk `number` of those that its
    sender has for the receiver in the group. The bytes lie in the window of their link, over which nothing else goes.
    """

    traffic: ClassVar[str] = ALL_REDUCE

    group: int
    number: int
    step: int
    first: int


class ChunkBack(ReducedChunk, frozen=True, array_like=True, tag=True, gc=False):
    """A `ReducedChunk` to who has opened the link, whose own vector has the window."""

    asked: ClassVar[bool] = True


class ChunksTaken(Message, frozen=True, array_like=True, tag=True, gc=False):
    """So many chunks of the group are taken out of the window; there is room for others."""

    group: int
    count: int


class State(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of one array of what the source holds; `left` is how many messages come after this one."""

    group: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    left: int
    data: bytes = b""


GROUPING = Conversation(
    "Grouping",
    (
        Says(Assemble, by=(Kind.COORDINATOR, Kind.REPLICA), to=(Kind.REPLICA,)),
        Says(GroupHello, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(State, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(AskReceipt, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Receipt, by=(Kind.REPLICA,), to=(Kind.REPLICA,), answers=AskReceipt),
        Says(ReducedPiece, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(ReducedChunk, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(ChunkBack, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(ChunksTaken, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Evaluate, by=(Kind.COORDINATOR, Kind.REPLICA), to=(Kind.REPLICA,)),
        Says(Evaluated, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Evaluate),
        Says(Broken, by=(Kind.REPLICA,), to=(Kind.COORDINATOR, Kind.REPLICA)),
        Says(Halt, by=(Kind.COORDINATOR, Kind.REPLICA), to=(Kind.REPLICA,)),
        Says(Halted, by=(Kind.REPLICA,), to=(Kind.COORDINATOR, Kind.REPLICA), answers=Halt),
        Says(Restored, by=(Kind.REPLICA,), to=(Kind.COORDINATOR, Kind.REPLICA)),
        Says(Snapshot, by=(Kind.COORDINATOR, Kind.REPLICA), to=(Kind.REPLICA,)),
        Says(SnapshotDone, by=(Kind.REPLICA,), to=(Kind.COORDINATOR, Kind.REPLICA), answers=Snapshot),
        Says(Describe, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Description, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Describe),
        *(Says(message, by=(Kind.REPLICA,), to=(Kind.REPLICA,)) for message in (PartSquares, PartValues)),
    ),
)
