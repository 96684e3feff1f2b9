"""Pushing: messages by which gradients go to the shards, and parameters come back.

A push names the ranges of the flat vector that have a gradient, and the encoding of its bytes. Bytes outside these
ranges do not count.
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
"""Encodings of a push's bytes; dense is the vector as it is."""


class Push(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Sum of a replica's accrued gradients, each the mean over its minibatch, and the values of its buffers."""

    traffic: ClassVar[str] = PUSH

    incarnation: int
    clock: int
    version: Version
    """Version of the shard from which the oldest of these gradients was computed."""
    steps: int
    samples: int
    tick: int = 0
    """Tick of the replica (see `core/consistency`)."""
    partition: int = 0
    """Partition of the replica; 0 where it is whole."""
    ranges: tuple[Range, ...] = ()
    """Ranges of the flat vector that have a gradient, in order."""
    encoding: str = DENSE
    """One of `ENCODINGS`."""
    rate: float = 1.0
    """Factor on the learning rate that the replica's script sets."""
    options: tuple[GroupOption, ...] = ()
    """Other options of parameter groups that the script has changed; a round uses those of its first push."""
    weight: float = 0.0
    """Weight of the change of local steps in a round; 0 for its samples."""


class Pushed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Acknowledgement of a push: it is in this version, or `dropped` as too late; its slot is free again."""

    slot: int
    clock: int
    version: Version
    dropped: bool = False
    incarnation: int = 0


class Fetch(SlotRequest, frozen=True, array_like=True, tag=True, gc=False):
    """Request for parameters [start, stop) into the sender's vector `slot`, once the step at `tick` may begin."""

    tick: int = 0
    incarnation: int = 0
    number: int = 0
    """Number of this request among the sender's; the answer repeats it."""


class Fetched(SlotReply, frozen=True, array_like=True, tag=True, gc=False):
    """Parameters of a version, in the slot of the request."""

    traffic: ClassVar[str] = FETCH

    version: Version
    floor: int = 0
    """Tick below which all pushes are in these parameters."""
    number: int = 0
    """Number of the request."""
    samples: int = 0
    """Samples of all pushes that are in these parameters."""


PUSHING = Conversation(
    "Pushing",
    (
        Says(Push, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Pushed, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=Push),
        Says(Fetch, by=(Kind.REPLICA, Kind.EVALUATOR), to=(Kind.SHARD,)),
        Says(Fetched, by=(Kind.SHARD,), to=(Kind.REPLICA, Kind.EVALUATOR), answers=Fetch),
    ),
)
