"""Grouping: the messages by which replicas form a group that adds up their gradients, and go on without those that are
gone.
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
    """Confirmation that a replica takes part in no group, with the rounds that it has made."""

    group: int
    rounds: int


class Broken(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a replica cannot go on in its group, though nobody may have died."""

    group: int
    reason: str


# coordinator to replica


class Halt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to leave the present group at once, since group `group` is to be formed."""

    group: int


class Assemble(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to form a group after so many rounds; member `source` gives the others what they lack, from a checkpoint
    where one is named.
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
    """Squared norms of a partition's parts of cut layers in a round; from the lead, their sums over all partitions.
    Nobody makes the update before.
    """

    generation: int
    exchange: int
    """Number of this exchange of such messages since then."""
    of: Squares


class PartValues(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of a partition's part of the vector, from `start` on, for its lead to measure the whole; `left` messages
    follow.
    """

    group: int
    start: int
    left: int
    data: bytes


# replica to replica


class AskReceipt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to confirm all that was sent before, so that no more piles up on its way."""

    number: int


class Receipt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that all before the `AskReceipt` of this number is taken."""

    number: int


class GroupHello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message on a link between members, by which the receiver can use it."""

    group: int


class ReducedPiece(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Elements of a bucket, from byte `start` of the flat vector on, at one step of a round's schedule."""

    traffic: ClassVar[str] = ALL_REDUCE

    group: int
    round: int
    bucket: int
    step: int
    start: int
    adds: bool
    data: bytes = b""


class ReducedChunk(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Chunk `number` of a vector, from element `first` on, at one step of its schedule. Its bytes lie in the window of
    their link, over which nothing else goes.
    """

    traffic: ClassVar[str] = ALL_REDUCE

    group: int
    number: int
    step: int
    first: int


class ChunkBack(ReducedChunk, frozen=True, array_like=True, tag=True, gc=False):
    """`ReducedChunk` to the role that has opened the link, whose own vector has the window."""

    asked: ClassVar[bool] = True


class ChunksTaken(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Count of chunks that are taken out of the window."""

    group: int
    count: int


class State(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of one array that the source holds; `left` messages follow."""

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
