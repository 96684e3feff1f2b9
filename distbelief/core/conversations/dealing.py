"""Dealing: messages by which replicas are dealt minibatches and report their work."""

from __future__ import annotations

from typing import NamedTuple

from distbelief.core.conversations.membership import Refused
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.portions import Portion
from distbelief.core.roles import Kind


class StreamStart(NamedTuple):
    """Digest of the first samples of an epoch's stream, which must be the same for all replicas."""

    epoch: int
    digest: int


class Progress(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica on its work since the last one."""

    steps: int
    """Steps whose pushes all shards have acknowledged."""
    samples: int
    pushes: int
    loss: float
    """Sum over the `losses` steps computed since the last report."""
    losses: int
    wants: bool
    """True where it asks for a portion."""
    dropped: tuple[tuple[int, int], ...] = ()
    """Pushes that were dropped: the number of `steps` before each, and its own steps."""
    returned: tuple[Portion, ...] = ()
    """Portions that it gives back, not begun."""
    start: StreamStart | None = None
    """Start of its stream, sent once in an epoch where all replicas read the same stream."""
    step_seconds: float = 0.0
    """Mean time of a step, computing only, since the last report; 0 without one."""


class Deal(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Next minibatches of a replica."""

    portion: Portion
    steps: int = 0
    """Steps of its next pushes; 0 for those of --push-every."""


class Drain(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to push what is accrued, report it and wait, since there is nothing to deal now."""

    epoch: int = 0
    """Epoch that has nothing left to deal."""


class Recall(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to give back portions that are not begun."""


class StreamEnded(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica that its stream ends before minibatch `number` of an epoch."""

    epoch: int
    number: int


DEALING = Conversation(
    "Dealing",
    (
        Says(Progress, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Refused, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Deal, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=Progress),
        Says(StreamEnded, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(Drain, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=Progress),
        Says(Recall, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
    ),
)
