"""Membership: messages by which roles join a job, learn the addresses of its shards and how far it is, and leave it."""

from __future__ import annotations

from typing import NamedTuple

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Address, Message
from distbelief.core.optimizer import Optimizer
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan
from distbelief.sharding.layout import Layout


class Here(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First message of a shard: it has started, and waits for its range."""

    incarnation: int = 0
    address: str = ""
    """Address at which it listens."""


class PartPlace(NamedTuple):
    """Addresses of a whole replica, or of one partition, for roles that add up gradients with it."""

    place: Address
    store: str
    """Address of its carrier, in that carrier's terms; the group of which it is the first member meets there."""


class Join(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to take part."""

    incarnation: int
    layout: Layout
    samples: int
    """Size of its training set; -1 for a stream, 0 from the evaluator."""
    batch_size: int = 0
    """Batch size that a user's loop names; 0 for the job's."""
    epochs: int = 0
    """Epochs that a user's loop names; 0 for the job's."""
    order: str = ""
    """Order that a user's loop names; "" for the job's."""
    optimizers: tuple[Optimizer, ...] = ()
    """Optimizers that a user's loop names, one for each model; none for the job's."""
    local: Optimizer | None = None
    """Optimizer of local steps that a user's loop names; None for the job's."""
    keeps: bool = False
    """True where its script keeps state that goes into checkpoints."""
    places: tuple[PartPlace, ...] = ()
    """Addresses of its partitions, in order, where replicas add up gradients among themselves."""
    digest: str = ""
    """Digest of its initial parameters, where replicas hold the parameters."""


class Welcome(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Admission to a job, with its plan and the addresses of its shards."""

    plan: Plan
    initialise: bool
    """True for the replica that sends the initial parameters."""
    shards: tuple[Address, ...]
    generation: int = 0
    """Number of times that all have gone back to a checkpoint; pushes of lower generations are forgotten."""


class Refused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Refusal of a role, with the reason; `layout` is True where its model does not fit."""

    reason: str
    layout: bool = False


class Rejoin(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request for another welcome, after the loss of links to shards."""

    lost: tuple[tuple[str, int], ...] = ()
    """Shards that it has lost, each with its incarnation."""


class Anew(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica that it has begun anew: its further messages are of this generation."""

    generation: int


class Finish(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to push what is accrued, report it and leave: the job is over."""

    reason: str


class Leave(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to leave: the replica has nothing more to do."""

    for_good: bool = False
    """True where its script's loop is over, so that it cannot take work again."""
    stops: bool = False
    """True where its script ends the job for all."""


class Farewell(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to `Leave`: the shards hold all that the replica did."""


class Stop(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to end the role."""

    reason: str


class AskReached(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Question of a script that is about to begin its loop."""


class JobReached(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Earliest epoch in which the job has minibatches left, and its newest checkpoint ("" for none)."""

    epoch: int
    checkpoint: str
    resumed: bool
    """True where the job goes on from an earlier attempt."""


MEMBERSHIP = Conversation(
    "Membership",
    (
        Says(Here, by=(Kind.SHARD, Kind.STANDBY), to=(Kind.COORDINATOR,)),
        Says(Join, by=(Kind.REPLICA, Kind.EVALUATOR), to=(Kind.COORDINATOR,)),
        Says(Welcome, by=(Kind.COORDINATOR,), to=(Kind.REPLICA, Kind.EVALUATOR), answers=Join),
        Says(Refused, by=(Kind.COORDINATOR,), to=(Kind.REPLICA, Kind.EVALUATOR), answers=Join),
        Says(Refused, by=(Kind.SHARD,), to=(Kind.REPLICA,)),
        Says(Rejoin, by=(Kind.REPLICA, Kind.EVALUATOR), to=(Kind.COORDINATOR,)),
        Says(Anew, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(AskReached, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(JobReached, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=AskReached),
        Says(Finish, by=(Kind.COORDINATOR, Kind.SUPERVISOR), to=(Kind.REPLICA,)),
        Says(Leave, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Farewell, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=Leave),
        Says(Stop, by=(Kind.SUPERVISOR,), to=(Kind.COORDINATOR,)),
        Says(Stop, by=(Kind.COORDINATOR,), to=(Kind.REPLICA, Kind.SHARD, Kind.STANDBY, Kind.EVALUATOR)),
    ),
)
