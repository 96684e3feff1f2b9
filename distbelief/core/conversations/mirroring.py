"""Mirroring: the messages by which a standby holds all that its shard has acknowledged, and takes its place.

A shard sends its standby its whole state once, then every push that it applies, in the order and with the learning rate
with which it applied it; in rounds it sends the aggregate, once; of a descent, every operation and every work unit. It
acknowledges what its standby has confirmed. Whatever is numbered is confirmed by `Confirmed`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import get_args

import msgspec

from distbelief.core.conversations.agreement import Norms, Ruling, Squares
from distbelief.core.conversations.initialising import Ready, Restored
from distbelief.core.conversations.membership import Here
from distbelief.core.conversations.operations import Operate
from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost
from distbelief.core.ledger import PushTaken
from distbelief.core.messages import Address, Bulk, Message
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan

# coordinator to standby


class Stand(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to hold what this life of the shard sends, and to forget what another sent."""

    plan: Plan
    incarnation: int


class Succeed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to be the shard, in this life of it, since it is gone."""

    incarnation: int


# standby to coordinator


class Stands(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that the standby is ready for the state of this life of its shard."""

    incarnation: int


# coordinator to shard


class BeginMirroring(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to send the standby all, and to acknowledge nothing that it has not confirmed."""

    place: Address


class Unmirrored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a life of the standby takes nobody's place: acknowledge without it."""

    incarnation: int


# shard to coordinator


class Mirrored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a life of the standby holds, from here on, all that its shard acknowledges."""

    incarnation: int


class StandbyLost(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that the link to the standby is gone; the shard acknowledges nothing until `Unmirrored`."""

    incarnation: int


# shard to standby; `incarnation` is the shard's


class StatePart(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of one array of the shard's state, from `offset` on."""

    incarnation: int
    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Summing(msgspec.Struct, frozen=True, array_like=True):
    """State of a shard that descends: its newest operation with its scalars, and the sum of its newest evaluation."""

    operation: int
    scalars: tuple[float, ...]
    into: tuple[str, ...]
    ordered: bool
    taken: tuple[int, ...]
    """The work units that it took, of which those that wait for their turn were sent before."""
    next: int
    """The work unit whose turn it is, where they are summed in order."""


class StateSent(Message, frozen=True, array_like=True, tag=True, gc=False):
    """End of the state: counts, and the pushes that the ledger has taken."""

    incarnation: int
    number: int
    updates: int
    samples: int
    staleness: dict[int, int]
    taken: tuple[PushTaken, ...]
    floor: int
    rulings: tuple[Ruling, ...]
    norms: tuple[Norms, ...] = ()
    summing: Summing | None = None


class CopyUse(StrEnum):
    """Use of a copy of a gradient by a standby."""

    APPLY = "apply"
    GATHER = "gather"
    SUM = "sum"


class Copied(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Push that is applied or gathered; or the sum of an update's pushes, which is made with `weight`."""

    incarnation: int
    number: int
    what: CopyUse
    keys: tuple[PushTaken, ...]
    staleness: tuple[int, ...]
    samples: int
    factor: float
    """Factor on the learning rate."""
    weight: float = 1.0
    floor: int = 0
    """Floor of the shard's policy after it."""
    norms: Squares = ()
    """Norms of the layers that are cut."""


class Decided(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Decision without bytes: an update of what was gathered, a dropped push, or a ruling. `floor` is that of the
    shard's policy after it.
    """

    incarnation: int
    number: int
    step: tuple[int, float, float] | None = None
    """Its samples, its factor of the learning rate, its weight."""
    dropped: PushTaken | None = None
    ruling: Ruling | None = None
    floor: int = 0


class OperationsDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Operations on named vectors that are done, and their scalars."""

    incarnation: int
    number: int
    operate: Operate
    scalars: tuple[float, ...]


class WorkUnitTaken(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Work unit of the newest evaluation that is taken."""

    incarnation: int
    number: int
    work_unit: int
    part: int


Numbered = StatePart | StateSent | Copied | Decided | OperationsDone | WorkUnitTaken
"""Messages that a standby confirms, of the life of the shard that it follows."""

# standby to shard


class Confirmed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation of all up to this number, whose slot may be written again (-1: it had none)."""

    incarnation: int
    number: int
    slot: int = -1


class StandbyStanding(TextEnum):
    """State of a standby, as the coordinator knows it."""

    AWAY = "away"
    HERE = "here"
    TOLD = "told"
    SENT = "sent"
    MIRRORS = "mirrors"


_FOLLOWS = (StandbyStanding.TOLD, StandbyStanding.SENT, StandbyStanding.MIRRORS)

STANDBY = States(
    "a standby",
    {
        StandbyStanding.AWAY: "it is not there",
        StandbyStanding.HERE: "it is there",
        StandbyStanding.TOLD: "it is told whose state it will be sent",
        StandbyStanding.SENT: "it is being sent it",
        StandbyStanding.MIRRORS: "it holds all that its shard acknowledges",
    },
    (
        Transition(StandbyStanding.AWAY, StandbyStanding.HERE, (Here,)),
        Transition(StandbyStanding.HERE, StandbyStanding.TOLD, (Here, Restored, Ready)),
        Transition(StandbyStanding.TOLD, StandbyStanding.SENT, (Stands,)),
        Transition(StandbyStanding.SENT, StandbyStanding.MIRRORS, (Mirrored,)),
        *(Transition(before, StandbyStanding.HERE, (Lost, Here)) for before in _FOLLOWS),
        *(
            Transition(before, StandbyStanding.AWAY, (Lost, StandbyLost))
            for before in (StandbyStanding.HERE, *_FOLLOWS)
        ),
    ),
)

MIRRORING = Conversation(
    "Mirroring",
    (
        Says(Stand, by=(Kind.COORDINATOR,), to=(Kind.STANDBY,)),
        Says(Stands, by=(Kind.STANDBY,), to=(Kind.COORDINATOR,), answers=Stand),
        Says(BeginMirroring, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        *(Says(numbered, by=(Kind.SHARD,), to=(Kind.STANDBY,)) for numbered in get_args(Numbered)),
        Says(Confirmed, by=(Kind.STANDBY,), to=(Kind.SHARD,)),
        Says(Mirrored, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=BeginMirroring),
        Says(StandbyLost, by=(Kind.SHARD,), to=(Kind.COORDINATOR,)),
        Says(Unmirrored, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Succeed, by=(Kind.COORDINATOR,), to=(Kind.STANDBY,)),
    ),
    (STANDBY,),
)
