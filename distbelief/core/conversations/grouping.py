"""Grouping: the messages of a job whose replicas reduce their gradients among themselves, under a coordinator that
deals to all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from distbelief.core.conversations.agreement import Squares
from distbelief.core.conversations.evaluating import Evaluate, Evaluated
from distbelief.core.conversations.membership import Finish, Leave, Refused, Stop
from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost, Saved
from distbelief.core.messages import ALL_REDUCE, Address, Bulk, Message
from distbelief.core.portions import Portion
from distbelief.core.roles import Kind, at_partition
from distbelief.core.settings import Plan
from distbelief.sharding.layout import Layout

NOTHING = -2
"""The rounds of a replica that holds nothing yet."""


class PartPlace(NamedTuple):
    """A partition of a split replica, as those that add up gradients with it find it."""

    place: Address
    store: str


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


class Enter(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica asks to take part; `digest` is of its initial parameters, and the rest is as in `Join`."""

    incarnation: int
    address: str
    layout: Layout
    samples: int
    batch_size: int
    digest: str
    store: str = ""
    epochs: int = 0
    parts: tuple[PartPlace, ...] = ()
    """The partitions of a split replica that follow its lead."""


class Halted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica takes part in no group any more; it has made so many rounds."""

    group: int
    rounds: int


class RoundsMade(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The rounds that a replica has made in all, and the sum of the losses of its steps since its last report."""

    group: int
    rounds: int
    loss: float
    losses: int


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


class RoundBatch(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The next minibatches of a group: in each round its members take the next ones, in their order; the last round may
    not have one for all.
    """

    group: int
    portion: Portion


class Keep(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Write what you hold as the one part of checkpoint `number`."""

    number: int


class Kept(Message, frozen=True, array_like=True, tag=True, gc=False):
    """It is on disk, or the error that kept it from there; and how many updates are in it, since the first of all
    attempts of the job.
    """

    number: int
    error: str
    updates: int
    script: bool = False
    """True where what a script keeps is on disk too."""


# partition to partition of one replica: beside these, the lead is to the others what the coordinator is to it


class PartSummed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A partition holds the sum of the gradients of its part in a round, which has this norm, where the job clips; of
    its own part of the step the loss, where it has that.
    """

    group: int
    round: int
    norm: float
    loss: float
    losses: int


class UpdatePart(Message, frozen=True, array_like=True, tag=True, gc=False):
    """All partitions of the replica hold the sums of a round, which together have this norm: make the update. So none
    makes one that others do not.
    """

    group: int
    round: int
    norm: float


class PartSquares(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Squared norms that a partition's parts of cut layers add to a round; back from the lead, before any makes the
    update, their sums over all partitions.
    """

    group: int
    round: int
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


class GroupPhase(TextEnum):
    """Phase of a job in groups."""

    GATHERING = "gathering"
    TRAINING = "training"
    CLOSING = "closing"
    LEAVING = "leaving"


GROUP_PHASES = States(
    "a job in groups",
    {
        GroupPhase.GATHERING: "waits for all replicas to be there",
        GroupPhase.TRAINING: "deals minibatches to a group of those who are there",
        GroupPhase.CLOSING: "waits for the last round, the last evaluation and the last checkpoint",
        GroupPhase.LEAVING: "waits for the replicas to leave",
    },
    (
        Transition(GroupPhase.GATHERING, GroupPhase.TRAINING, (Enter, Leave, Lost)),
        Transition(GroupPhase.TRAINING, GroupPhase.CLOSING, (Enter, RoundsMade, Evaluated, Stop, Leave, Lost, Halted)),
        Transition(GroupPhase.CLOSING, GroupPhase.LEAVING, (RoundsMade, Evaluated, Saved)),
        Transition(
            GroupPhase.CLOSING, GroupPhase.TRAINING, (Enter, Halted, Leave, Lost)
        ),  # nobody is left who holds what was made: all begin at a checkpoint
    ),
)


class GroupMay(TextEnum):
    """Action of a coordinator of groups that only some phases allow."""

    GATHER = "wait for all replicas, to begin with all"
    DEAL = "deal minibatches, begin checkpoints, and let the job end"
    REGROUP = "form another group when one dies, leaves or comes"
    DISMISS = "have those who come finish"


GROUP_ALLOWED: Mapping[GroupPhase, frozenset[GroupMay]] = {
    GroupPhase.GATHERING: frozenset({GroupMay.GATHER}),
    GroupPhase.TRAINING: frozenset({GroupMay.DEAL, GroupMay.REGROUP}),
    GroupPhase.CLOSING: frozenset({GroupMay.REGROUP}),
    GroupPhase.LEAVING: frozenset({GroupMay.DISMISS}),
}
"""Actions of a coordinator of groups that each phase allows."""


class Duty(TextEnum):
    """Task of the first member of a group, done for all: the last things of a job."""

    MEASURE = "measure"
    KEEP = "keep"
    DISMISS = "dismiss"


GROUPING = Conversation(
    "Grouping",
    (
        Says(Enter, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Refused, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=Enter),
        Says(Assemble, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(GroupHello, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(State, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(AskReceipt, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Receipt, by=(Kind.REPLICA,), to=(Kind.REPLICA,), answers=AskReceipt),
        Says(RoundsMade, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(RoundBatch, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(ReducedPiece, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(ReducedChunk, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(ChunkBack, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(ChunksTaken, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(Evaluate, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Evaluated, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Evaluate),
        Says(Keep, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Kept, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Keep),
        Says(Broken, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Halt, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Halted, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Halt),
        Says(Finish, by=(Kind.COORDINATOR, Kind.SUPERVISOR), to=(Kind.REPLICA,)),
        Says(Leave, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Stop, by=(Kind.SUPERVISOR,), to=(Kind.COORDINATOR,)),
        Says(Stop, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        *(
            Says(message, by=(Kind.REPLICA,), to=(Kind.REPLICA,))
            for message in (
                Enter,
                Assemble,
                RoundBatch,
                RoundsMade,
                Evaluate,
                Keep,
                Kept,
                Broken,
                Halt,
                Halted,
                PartSquares,
                PartValues,
            )
        ),
        Says(PartSummed, by=(Kind.REPLICA,), to=(Kind.REPLICA,)),
        Says(UpdatePart, by=(Kind.REPLICA,), to=(Kind.REPLICA,), answers=PartSummed),
    ),
    (GROUP_PHASES,),
)
