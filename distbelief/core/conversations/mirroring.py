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
    """Hold what this life of your shard will send you; forget what another has sent."""

    plan: Plan
    incarnation: int


class Succeed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Your shard is gone: be it, in this life of it."""

    incarnation: int


# standby to coordinator


class Stands(Message, frozen=True, array_like=True, tag=True, gc=False):
    """It is ready to be sent what a life of its shard holds."""

    incarnation: int


# coordinator to shard


class BeginMirroring(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Have your standby, which is there, hold what you hold, and acknowledge nothing that it has not confirmed."""

    place: Address


class Unmirrored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A life of your standby will not take your place: acknowledge what it has not confirmed."""

    incarnation: int


# shard to coordinator


class Mirrored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A life of a shard's standby holds all that the shard has acknowledged, and will."""

    incarnation: int


class StandbyLost(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The link to that life of its standby is gone; the shard acknowledges nothing until it is told that it is
    alone.
    """

    incarnation: int


# shard to standby; `incarnation` is the shard's


class StatePart(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Bytes of one array of its state, from `offset` on."""

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
    """The end of a shard's state: these counts, and the pushes that its ledger has taken."""

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
    """A push that it has applied, or has gathered for the next update; or the sum of all pushes of an update, which it
    makes with `weight`.
    """

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
    """A decision without bytes: an update with what was gathered, a push that was dropped, or a ruling. `floor` is that
    of the shard's policy after it.
    """

    incarnation: int
    number: int
    step: tuple[int, float, float] | None = None
    """Its samples, its factor of the learning rate, its weight."""
    dropped: PushTaken | None = None
    ruling: Ruling | None = None
    floor: int = 0


class OperationsDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Operations on named vectors that it has done, and the scalars that it found."""

    incarnation: int
    number: int
    operate: Operate
    scalars: tuple[float, ...]


class WorkUnitTaken(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """A work unit of its newest evaluation that it has taken."""

    incarnation: int
    number: int
    work_unit: int
    part: int


Numbered = StatePart | StateSent | Copied | Decided | OperationsDone | WorkUnitTaken
"""Messages that a standby confirms, of the life of the shard that it follows."""

# standby to shard


class Confirmed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The standby, in this life of it, has done all up to this number; the slot it came in may be written again (-1: it
    had none).
    """

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
