"""Checkpointing: messages by which replicas hold their pushes, and shards save their state and account for it."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost, Saved
from distbelief.core.messages import Message, Version
from distbelief.core.roles import Kind


class Hold(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to hold all pushes until `Go`, and to report once all that was pushed is applied."""

    number: int


class Held(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to `Hold`: all pushes are applied and reported, and no more are made."""

    number: int


class Snapshot(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to save a shard's slice as its part of checkpoint `number`."""

    number: int


class SnapshotDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to `Snapshot`: the part is on disk, unless there is an error."""

    number: int
    error: str
    seconds: float = 0.0
    """Time that writing took."""


LEAVING = 0
"""Number in place of a checkpoint's, for a replica that leaves."""


class SaveScript(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to save a script's state for checkpoint `number`, or because the replica leaves."""

    number: int


class ScriptSaved(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Answer to `SaveScript`: the state is on disk, unless there is an error."""

    number: int
    error: str


class Go(Message, frozen=True, array_like=True, tag=True, gc=False):
    """End of a hold: the replica may push again."""


class Describe(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request for a shard's account."""


class Description(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Account of a shard: its updates, their samples, and the number of pushes of each staleness."""

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
        CheckpointStage.HOLDING: "replicas hold their pushes until all are applied and reported; a synchronous job "
        "deals nothing until no replica holds a minibatch",
        CheckpointStage.WRITING: "the shards write their parts",
        CheckpointStage.SEALING: "the store seals them, once a script's state is saved, or removes them",
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
