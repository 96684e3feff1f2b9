"""Mirroring: messages by which a standby holds all that its shard has acknowledged, and takes its place.

A shard sends its standby its whole state once, then every push that it applies, in order and with its learning rate; in
rounds it sends each aggregate, and in a descent every operation and work unit. It acknowledges a push only once its
standby has confirmed it. `Confirmed` answers every numbered message.
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
    """Request to hold the state that this incarnation of the shard will send, and to forget any other."""

    plan: Plan
    incarnation: int


class Succeed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to take the shard's place, as this incarnation of it."""

    incarnation: int


# standby to coordinator


class Stands(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to `Stand`: the standby is ready for the state of that incarnation."""

    incarnation: int


# coordinator to shard


class BeginMirroring(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to send the shard's state to its standby, and to acknowledge only what the standby has confirmed."""

    place: Address


class Unmirrored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """News that an incarnation of the standby is gone: no confirmations will come."""

    incarnation: int


# shard to coordinator


class Mirrored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that an incarnation of the standby holds all that the shard has acknowledged."""

    incarnation: int


class StandbyLost(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that a link to a standby is gone; the shard acknowledges nothing until `Unmirrored`."""

    incarnation: int


# shard to standby; `incarnation` is the shard's


class StatePart(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of an array of the shard's state, from `offset` on."""

    incarnation: int
    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Summing(msgspec.Struct, frozen=True, array_like=True):
    """State of a shard in a descent: its newest operation with scalars, and the sum of its newest evaluation."""

    operation: int
    scalars: tuple[float, ...]
    into: tuple[str, ...]
    ordered: bool
    taken: tuple[int, ...]
    """Work units that it has taken."""
    next: int
    """Work unit whose turn it is, where they are summed in order."""


class StateSent(Message, frozen=True, array_like=True, tag=True, gc=False):
    """End of a shard's state: its counts, and the last pushes in its ledger."""

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
    """Use that a standby makes of its copy of a gradient."""

    APPLY = "apply"
    GATHER = "gather"
    SUM = "sum"


class Copied(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Push that the shard has applied or gathered; or the sum of an update's pushes, with its `weight`."""

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
    """Squared norms of layers that are cut."""
    period: int = 0
    """Replicas that take part, where the optimizer has a period; else 0."""


class Decided(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Decision without bytes: an update with the gathered pushes, a dropped push, or a ruling."""

    incarnation: int
    number: int
    step: tuple[int, float, float] | None = None
    """Samples of the update, its factor on the learning rate, and its weight."""
    dropped: PushTaken | None = None
    ruling: Ruling | None = None
    floor: int = 0
    """Floor of the shard's policy after it."""


class OperationsDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Operations on named vectors that the shard has done, and their scalars."""

    incarnation: int
    number: int
    operate: Operate
    scalars: tuple[float, ...]


class WorkUnitTaken(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Work unit of the newest evaluation that the shard has taken."""

    incarnation: int
    number: int
    work_unit: int
    part: int


Numbered = StatePart | StateSent | Copied | Decided | OperationsDone | WorkUnitTaken
"""Messages that a standby confirms."""

# standby to shard


class Confirmed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation of a standby's incarnation: it has all up to this number; the message's slot (-1: none) is free."""

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
_PRESENT = (StandbyStanding.HERE, *_FOLLOWS)

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
        *(Transition(before, StandbyStanding.AWAY, (Lost, StandbyLost)) for before in _PRESENT),
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
