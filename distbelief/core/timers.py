"""Timers: what a role may ask the clock to tell it, when a time has come."""

from __future__ import annotations

import msgspec


class Timer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reason for a wake-up."""


class CheckpointDue(Timer, frozen=True, array_like=True, tag=True):
    """Time for a checkpoint."""


class BudgetSpent(Timer, frozen=True, array_like=True, tag=True):
    """The job has trained for as long as it was to."""


class HoldOver(Timer, frozen=True, array_like=True, tag=True):
    """Replicas have held their pushes for long enough: what has not said that it does is not waited for."""

    number: int
    """Number of times that pushes were held so far."""


class ScriptOver(Timer, frozen=True, array_like=True, tag=True):
    """A replica has not saved what its script keeps for long enough: it is not waited for."""

    number: int
    """Number of the checkpoint."""


class DoubtOver(Timer, frozen=True, array_like=True, tag=True):
    """A shard that somebody has lost, and of whose death nobody has heard since, lives."""

    shard: str
    incarnation: int


class BucketDue(Timer, frozen=True, array_like=True, tag=True):
    """The gradients of a bucket are there, of a step that is simulated as it goes."""

    group: int
    round: int
    bucket: int


class PartedOver(Timer, frozen=True, array_like=True, tag=True):
    """A partition has been without its link to another for so long that nobody will have it end for that."""

    role: str


AnyTimer = CheckpointDue | BudgetSpent | HoldOver | ScriptOver | DoubtOver | BucketDue | PartedOver
"""Every timer."""
