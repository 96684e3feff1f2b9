"""Pushing: the messages by which gradients go to the shards, and parameters come back.

A push says which ranges of the flat vector it covers, and how the bytes behind it encode its part of that. It covers
what has a gradient: of the rest the bytes count for nothing.
"""

from __future__ import annotations

from typing import ClassVar

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import FETCH, PUSH, Bulk, Message, SlotReply, SlotRequest, Version
from distbelief.core.optimizer import GroupOption
from distbelief.core.roles import Kind
from distbelief.sharding.layout import Range

DENSE = "dense"
ENCODINGS = (DENSE,)
"""Encodings of a push's part of the flat vector: dense, as it is."""


class Push(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Sum of a replica's accrued gradients, each the mean over its minibatch; buffers behind them by value. `tick`: see
    `core/consistency`.
    """

    traffic: ClassVar[str] = PUSH

    incarnation: int
    clock: int
    version: Version
    """The version of this shard from which the oldest of the accrued gradients was computed."""
    steps: int
    samples: int
    tick: int = 0
    partition: int = 0
    """Partition of the replica; 0 where it is whole."""
    ranges: tuple[Range, ...] = ()
    """Ranges of the flat vector that it covers, in order."""
    encoding: str = DENSE
    """One of `ENCODINGS`."""
    rate: float = 1.0
    """A factor of the learning rate, as the script of the replica sets it."""
    options: tuple[GroupOption, ...] = ()
    """Other options of its parameter groups that the script has changed; a round has those of its first push."""


class Pushed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that a push is in this version of the shard, or was `dropped` as too late for its round. Its slot
    may be written again.
    """

    slot: int
    clock: int
    version: Version
    dropped: bool = False
    incarnation: int = 0


class Fetch(SlotRequest, frozen=True, array_like=True, tag=True, gc=False):
    """Request for bytes [start, stop), into parameter vector `slot`, once the step of `tick` may begin."""

    tick: int = 0
    incarnation: int = 0
    number: int = 0
    """The question's number among all of the asker's; its answer has the same."""


class Fetched(SlotReply, frozen=True, array_like=True, tag=True, gc=False):
    """Parameters of a version, with the pushes of all ticks below `floor`. They lie in the slot that was named."""

    traffic: ClassVar[str] = FETCH

    version: Version
    floor: int = 0
    number: int = 0
    """The number of the question."""


PUSHING = Conversation(
    "Pushing",
    (
        Says(Push, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Pushed, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=Push),
        Says(Fetch, by=(Kind.REPLICA, Kind.EVALUATOR), to=(Kind.SHARD,)),
        Says(Fetched, by=(Kind.SHARD,), to=(Kind.REPLICA, Kind.EVALUATOR), answers=Fetch),
    ),
)
