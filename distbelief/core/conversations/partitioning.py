"""Partitioning: the messages between the partitions of a split replica. The first leads, and is to the others what the
coordinator is to a whole replica.

All of them tell the coordinator that they are there, are told where the others are, and link. The lead joins the job
for all, hands on what it is told, and deals each minibatch to the others; each pushes and fetches its own ranges. A
push counts as made when all have made theirs.
"""

from __future__ import annotations

from typing import ClassVar

from distbelief.core.conversations.dealing import Deal, Drain, Progress
from distbelief.core.conversations.initialising import Ready
from distbelief.core.conversations.membership import Anew, Farewell, Finish, Join, Leave, Refused, Rejoin, Welcome
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import PARTITIONS, Address, Message
from distbelief.core.roles import Kind


class PartitionHere(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First word of a partition."""

    place: Address
    """Address at which the others reach it, and the life of its replica, which all its partitions share."""


class Meet(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Addresses of all partitions of a replica, in their order."""

    places: tuple[Address, ...]


class PartitionHello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message on a link between partitions."""


class PushPart(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to push what has accrued, as push `clock` of this replica."""

    clock: int


class PartPushed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that all shards of a partition have applied its part of a push, or `dropped` it as too late."""

    clock: int
    dropped: bool = False


class AtRound(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Round of which this partition holds the parameters; from the lead, the highest of all."""

    generation: int
    exchange: int
    """Number of this exchange of such messages since then."""
    tick: int
    settled: bool = False
    """True where all partitions hold the parameters of this round."""


class PartNorm(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Norm of a partition's part of a step's gradient; from the lead, that of the whole."""

    generation: int
    exchange: int
    norm: float


class Crossed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Signal to look in the memory that partitions share."""


class Boundary(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Part of a value that crosses between two partitions in a step, or of its gradient."""

    traffic: ClassVar[str] = PARTITIONS

    generation: int
    step: int
    """Step of the replica, counted since then."""
    transfer: int
    """Number of the transfer among those of the split model."""
    microbatch: int
    backward: bool
    left: int
    """Parts of it that are still to come."""
    data: bytes


PARTITIONING = Conversation(
    "Partitioning",
    (
        Says(PartitionHere, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Meet, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=PartitionHere),
        Says(PartitionHello, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Boundary, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Crossed, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        *(
            Says(message, by=(Kind.REPLICA,), to=(Kind.REPLICA,))
            for message in (
                Join,
                Welcome,
                Refused,
                Ready,
                Rejoin,
                Deal,
                Drain,
                Progress,
                Anew,
                Finish,
                Leave,
                Farewell,
                AtRound,
                PartNorm,
            )
        ),
        Says(PushPart, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(PartPushed, by=(Kind.REPLICA,), to=(Kind.REPLICA,), answers=PushPart),
    ),
)
