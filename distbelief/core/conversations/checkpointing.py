"""Checkpointing: the messages by which replicas hold their pushes, and shards save what they hold and account for
it.
"""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost, Saved
from distbelief.core.messages import Message, Version
from distbelief.core.roles import Kind


class Hold(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to push nothing until checkpoint `number` is made; computing goes on."""

    number: int


class Held(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that every push is applied and reported, and that no more are made until checkpoint `number` is."""

    number: int


class Snapshot(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to save a slice as part of checkpoint `number`."""

    number: int


class SnapshotDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that a part of a checkpoint is on disk, or the error that prevented it."""

    number: int
    error: str


LEAVING = 0
"""In the place of the number of a checkpoint: of a replica that leaves."""


class SaveScript(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to save what the script keeps, for checkpoint `number` or before leaving."""

    number: int


class ScriptSaved(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that the script's state is on disk, or the error that prevented it."""

    number: int
    error: str


class Go(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Permission to push again: the checkpoint is made."""


class Describe(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request for a shard's account."""


class Description(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Account of a shard: its updates, and how many pushes had each staleness."""

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
