"""Upkeep: the messages by which the coordinator has the shards take their ranges, save and account for them, and takes up its links again."""

from __future__ import annotations

from distbelief.core.messages import Message, Place, Version
from distbelief.core.settings import Plan

# coordinator to shard


class Restore(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Hold this range of this plan; `checkpoint` names what to load it from, or is empty where a replica will send it.

    `members` go on as they were, at a shard that takes the place of one that died; none do where all begin anew from the checkpoint.
    """

    plan: Plan
    checkpoint: str
    members: tuple[tuple[str, int], ...] = ()
    """Replicas, and which life of each."""
    ruler: Place = Place("", 0)
    """Where the shard that rules the rounds is."""


class Snapshot(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Save your slice as part of checkpoint `number`."""

    number: int


class Describe(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Tell what you have applied."""


# shard to coordinator


class Here(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A shard is there and waits for its range: the first thing it says."""

    incarnation: int = 0
    address: str = ""
    """Where others reach it."""


class Restored(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard knows its range; `loaded` where it also holds parameters."""

    loaded: bool


class SnapshotDone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard's part of a checkpoint is on disk, or the error that kept it from there."""

    number: int
    error: str


class Description(Message, frozen=True, array_like=True, tag=True, gc=False):
    """What a shard has applied: updates, and how many pushes had each staleness."""

    version: Version
    samples: int
    staleness: dict[int, int]


# between any role and the coordinator, when one that died has come again


class Resume(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Here is who has lost its link to the coordinator: it has heard so many messages of it."""

    heard: int


class Resumed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """So many messages have come from that role (-1: it is gone, as far as the coordinator knows); what it has missed follows."""

    heard: int


Upkeep = Resume | Resumed | Restore | Snapshot | Describe | Here | Restored | SnapshotDone | Description
"""Every message of this file."""
