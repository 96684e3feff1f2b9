"""Membership: the messages by which roles join a job and leave it."""

from __future__ import annotations

from typing import NamedTuple

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Address, Message
from distbelief.core.optimizer import Optimizer
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan
from distbelief.sharding.layout import Layout


class Here(Message, frozen=True, array_like=True, tag=True, gc=False):
    """First word of a shard or a standby, with the address at which others reach it."""

    incarnation: int = 0
    address: str = ""
    """Address at which others reach it."""


class PartPlace(NamedTuple):
    """A partition of a replica, or a whole one, as those that add up gradients with it find it."""

    place: Address
    store: str
    """Address, in the terms of its carrier: others reach there what adds up its gradients, or the group of which it is
    the first member meets there.
    """


class Join(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to take part. `samples` is the size of the training set, -1 of one without a length; 0 from the
    evaluator. `batch_size`, `epochs` and `order` are the user's where his own loop names them, else 0 or "": the job's;
    so are `optimizers`, one for each model that it trains.
    """

    incarnation: int
    layout: Layout
    samples: int
    batch_size: int = 0
    epochs: int = 0
    order: str = ""
    optimizers: tuple[Optimizer, ...] = ()
    keeps: bool = False
    """True where its script keeps something that goes into checkpoints."""
    places: tuple[PartPlace, ...] = ()
    """Its partitions, in their order, where replicas add up their gradients among themselves."""
    digest: str = ""
    """Digest of its initial parameters, where replicas hold them."""


class Welcome(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Settings and plan of the job, and where its shards are; the first replica of a fresh job initialises them."""

    plan: Plan
    initialise: bool
    shards: tuple[Address, ...]
    generation: int = 0
    """Greater than before where all have gone back to a checkpoint, and what was pushed since is forgotten."""


class Refused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Refusal of a role; `layout` where its model is the reason."""

    reason: str
    layout: bool = False


class Rejoin(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a role has lost shards; it is welcomed again once all are there."""

    lost: tuple[tuple[str, int], ...] = ()
    """Shards that it has lost, each with the life to which the link is gone."""


class Anew(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a replica has begun anew, in this generation of the job."""

    generation: int


class Finish(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to push what is accrued, report it and leave: the job is over."""

    reason: str


class Leave(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to leave, since nothing is left to do."""

    for_good: bool = False
    """True where its own loop is over, so that it could not take up work again."""
    stops: bool = False
    """True where its script ends the job for all."""


class Farewell(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Permission to leave: all that the replica did is in what the shards hold."""


class Stop(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to end in peace."""

    reason: str


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
        Says(Finish, by=(Kind.COORDINATOR, Kind.SUPERVISOR), to=(Kind.REPLICA,)),
        Says(Leave, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Farewell, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=Leave),
        Says(Stop, by=(Kind.SUPERVISOR,), to=(Kind.COORDINATOR,)),
        Says(Stop, by=(Kind.COORDINATOR,), to=(Kind.REPLICA, Kind.SHARD, Kind.STANDBY, Kind.EVALUATOR)),
    ),
)
