"""Checkpointing: the messages by which replicas hold their pushes, and shards save what they hold and account for
it.
"""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost, Saved
from distbelief.core.messages import Message, Version
from distbelief.core.roles import Kind


class Hold(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Checkpoint `number` is to be made: compute, but push nothing until you may go on, and say when all that you
    pushed is applied.
    """

    number: int


class Held(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Every push of this replica is applied and reported, and it makes none until checkpoint `number` is made."""

    number: int


class Snapshot(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Save your slice as part of checkpoint `number`."""

    number: int


class SnapshotDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard's part of a checkpoint is on disk, or the error that kept it from there."""

    number: int
    error: str


LEAVING = 0
"""In the place of the number of a checkpoint: of a replica that leaves."""


class SaveScript(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Save what your script keeps, for checkpoint `number`, or as you leave."""

    number: int


class ScriptSaved(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The state that a script keeps is on disk, or the error that kept it from there."""

    number: int
    error: str


class Go(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The checkpoint is made: go on pushing."""


class Describe(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Tell what you have applied."""


class Description(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A shard's account: the updates that it has applied, and how many pushes had each staleness."""

    version: Version
    samples: int
    staleness: dict[int, int]


class CheckpointStage(TextEnum):
    """Stage of a checkpoint."""

    NONE = "none"
    HOLDING = "holding"
    WRITING = "writing"
    SEALING = "sealing"


CHECKPOINT = States(
    "a checkpoint",
    {
        CheckpointStage.NONE: "none is being made",
        CheckpointStage.HOLDING: "replicas push nothing more, until all that they pushed is applied and reported; a "
        "synchronous job deals "
        "nothing"
        " more, until nobody holds a minibatch",
        CheckpointStage.WRITING: "the shards write their parts",
        CheckpointStage.SEALING: "the store seals them, once a script has saved what it keeps, or clears them away",
    },
    (
        Transition(CheckpointStage.NONE, CheckpointStage.HOLDING),
        Transition(CheckpointStage.HOLDING, CheckpointStage.WRITING),
        Transition(CheckpointStage.WRITING, CheckpointStage.SEALING, (SnapshotDone, Lost)),
        Transition(CheckpointStage.SEALING, CheckpointStage.NONE, (Saved, Lost)),
        Transition(CheckpointStage.HOLDING, CheckpointStage.NONE),
    ),
)

CHECKPOINTING = Conversation(
    "Checkpointing",
    (
        Says(Hold, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Held, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Hold),
        Says(Snapshot, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(SnapshotDone, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Snapshot),
        Says(SaveScript, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(ScriptSaved, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=SaveScript),
        Says(Go, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Describe, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Description, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Describe),
    ),
    (CHECKPOINT,),
)
