"""Partitioning: messages between the partitions of a split replica. The first leads: it coordinates the others.

All partitions report to the coordinator, which sends them each other's addresses, and open links. The lead joins the
job for all of them, and deals each minibatch to the others. Each partition pushes and fetches its own ranges; a push
counts once all have made their parts.
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
    """First message of a partition: it has started."""

    place: Address
    """Address at which it listens, and the incarnation of its replica, which all its partitions share."""


class Meet(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Addresses of all partitions of a replica, in order."""

    places: tuple[Address, ...]


class PartitionHello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message on a link from one partition to another."""


class PushPart(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to a partition to push its part of push `clock`."""

    clock: int


class PartPushed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that a partition's part of a push is applied at all its shards, or was `dropped` as too late."""

    clock: int
    dropped: bool = False


class AtRound(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Round whose parameters a partition holds; from the lead, the highest round of all."""

    generation: int
    exchange: int
    """Number of this exchange within the generation."""
    tick: int
    settled: bool = False
    """True where all partitions hold that round's parameters."""


class PartNorm(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Norm of a partition's part of a gradient; from the lead, the norm of the whole gradient."""

    generation: int
    exchange: int
    norm: float


class Crossed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Wake-up call: a tensor that a partition may wait for is in shared memory."""


class Boundary(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Part of a tensor that crosses between two partitions in a step: a value, or its gradient."""

    traffic: ClassVar[str] = PARTITIONS

    generation: int
    step: int
    """Step of the replica within the generation."""
    transfer: int
    """Number of the transfer among those of the split model."""
    microbatch: int
    backward: bool
    left: int
    """Parts of the tensor that are still to come."""
    data: bytes


_EXCHANGED: tuple[type[Message], ...] = (
    Join, Welcome, Refused, Ready, Rejoin, Deal, Drain, Progress, Anew, Finish, Leave, Farewell, AtRound, PartNorm,
)  # fmt: skip
"""Messages that the lead and its partitions send each other, most of them as the coordinator and a replica do."""

PARTITIONING = Conversation(
    "Partitioning",
    (
        Says(PartitionHere, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Meet, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=PartitionHere),
        Says(PartitionHello, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Boundary, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Crossed, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        *(Says(message, by=(Kind.REPLICA,), to=(Kind.REPLICA,)) for message in _EXCHANGED),
        Says(PushPart, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(PartPushed, by=(Kind.REPLICA,), to=(Kind.REPLICA,), answers=PushPart),
    ),
)
