"""Dealing: the messages by which replicas are dealt minibatches and report what they have done."""

from __future__ import annotations

from typing import NamedTuple

from distbelief.core.conversations.membership import Refused
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.portions import Portion
from distbelief.core.roles import Kind


class StreamStart(NamedTuple):
    """A digest of the first samples of a stream that all replicas read, in an epoch."""

    epoch: int
    digest: int


class Progress(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report of a replica's work since its last; `wants` asks for a portion. A `dropped` push is the count of `steps`
    before it, and its own steps. Portions in `returned` are not begun.
    """

    steps: int
    """Steps whose pushes all shards acknowledged."""
    samples: int
    pushes: int
    loss: float
    """Sum over the `losses` steps computed since the last report."""
    losses: int
    wants: bool
    dropped: tuple[tuple[int, int], ...] = ()
    returned: tuple[Portion, ...] = ()
    start: StreamStart | None = None
    """The beginning of its stream, told once where all read the same."""


class Deal(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Next minibatches of a replica."""

    portion: Portion


class Drain(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that there is nothing to deal at present: push what is accrued, report it and wait."""

    epoch: int = 0
    """The epoch that has nothing left to deal."""


class Recall(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to give back what was dealt and is not begun."""


class StreamEnded(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that a replica's stream ends before minibatch `number` of this epoch."""

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
