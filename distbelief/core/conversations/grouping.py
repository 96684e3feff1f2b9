"""Grouping: messages by which replicas form a group, add up gradients, and go on when one joins or dies."""

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
"""Rounds of a replica that holds no parameters yet."""


class Member(NamedTuple):
    """Replica of a group; of a split one, the partition that leads."""

    role: str
    place: Address
    needs: bool
    """True where it lacks the parameters that the group begins with."""
    store: str
    """Address of its carrier; see `membership.PartPlace`."""
    parts: tuple[PartPlace, ...] = ()
    """Its other partitions, in order."""


def column(members: tuple[Member, ...], partition: int) -> tuple[Member, ...]:
    """Return one partition of each member: these add up the gradients of their part.

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
    """Answer to `Halt`: the replica has left its group after so many rounds."""

    group: int
    rounds: int


class Broken(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica that cannot go on in its group, though perhaps no member has died."""

    group: int
    reason: str


# coordinator to replica


class Halt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to leave the present group at once and report its rounds, since group `group` will be formed."""

    group: int


class Assemble(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to form a group."""

    group: int
    plan: Plan
    members: tuple[Member, ...]
    source: int
    """Index of the member that sends its parameters to those that need them."""
    rounds: int
    """Rounds that these parameters are of."""
    samples: int
    checkpoint: str = ""
    """Checkpoint that the source loads; "" for none."""


# partition to partition of one replica, whose lead also passes on the coordinator's messages


class PartSquares(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Shares of a partition in the squared norms of a round; from the lead, their sums over all partitions."""

    generation: int
    exchange: int
    """Number of this exchange within the generation."""
    of: Squares


class PartValues(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Part of a partition's parameters, from byte `start` on, for its lead; `left` messages follow."""

    group: int
    start: int
    left: int
    data: bytes


# replica to replica


class AskReceipt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request for a receipt of all that was sent before, so that little is on its way at a time."""

    number: int


class Receipt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Receipt of all that was sent before the `AskReceipt` of this number."""

    number: int


class GroupHello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message on a link from one member to another."""

    group: int


class ReducedPiece(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Elements of a bucket, from byte `start` of the flat vector on, at a step of a round's schedule."""

    traffic: ClassVar[str] = ALL_REDUCE

    group: int
    round: int
    bucket: int
    step: int
    start: int
    adds: bool
    data: bytes = b""


class ReducedChunk(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Elements of a vector, from element `first` on, at a step of its schedule, in the window of the link.

    `number` counts the chunks from this sender to this receiver in the group.
    """

    traffic: ClassVar[str] = ALL_REDUCE

    group: int
    number: int
    step: int
    first: int


class ChunkBack(ReducedChunk, frozen=True, array_like=True, tag=True, gc=False):
    """`ReducedChunk` to the member that has opened the link, whose vector is the window."""

    is_reply: ClassVar[bool] = True


class ChunksTaken(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that so many chunks of the group are taken out of the window, which has room for others."""

    group: int
    count: int


class State(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of an array of the source's state; `left` messages follow."""

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
