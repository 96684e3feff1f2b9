"""Timers: reasons for which a role asks the clock to wake it."""

from __future__ import annotations

import msgspec


class Timer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reason for a wake-up."""


class CheckpointDue(Timer, frozen=True, array_like=True, tag=True):
    """Time for a checkpoint."""


class BudgetSpent(Timer, frozen=True, array_like=True, tag=True):
    """End of a job's budget of time."""


class HoldOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for replicas that are to hold their pushes."""

    number: int
    """Number of the hold."""


class ScriptOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for a replica that is to save its script's state."""

    number: int
    """Number of the checkpoint."""


class DoubtOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the doubt about a shard that a replica has lost its link to: no news of its death has come."""

    shard: str
    incarnation: int


class GuestsOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for guests of a job that is over."""


class BucketDue(Timer, frozen=True, array_like=True, tag=True):
    """Moment at which a simulated step has the gradients of a bucket."""

    group: int
    round: int
    bucket: int


class PartedOver(Timer, frozen=True, array_like=True, tag=True):
    """End of the wait for a partition whose link to another is gone."""

    role: str


AnyTimer = CheckpointDue | BudgetSpent | HoldOver | ScriptOver | DoubtOver | GuestsOver | BucketDue | PartedOver
"""Every timer."""
