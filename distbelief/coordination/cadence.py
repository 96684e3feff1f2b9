"""When a job measures and keeps checkpoints, and whether it has reached its target: decided here for every strategy."""

from __future__ import annotations

from distbelief.core.effects import Effect, Wake
from distbelief.core.settings import Settings
from distbelief.core.timers import CheckpointDue


def is_due(every: int, done: int) -> bool:
    """Whether what is due every so many epochs, 0 for never, is due after so many.

    >>> is_due(2, 4), is_due(2, 5), is_due(0, 4)
    (True, False, False)
    """
    return every > 0 and done % every == 0


def target_reached(settings: Settings, accuracy: float | None) -> str:
    """That an accuracy on the test set is what the job was to reach, in a sentence; "" where it is not, or none was
    measured.

    >>> target_reached(Settings(target_accuracy=0.9), 0.91), target_reached(Settings(), 1.0)
    ('test accuracy 0.9100 reached the target 0.9', '')
    """
    target = settings.target_accuracy
    if not target or accuracy is None or accuracy < target:
        return ""
    return f"test accuracy {accuracy:.4f} reached the target {target}"


def snapshot_due(settings: Settings, pushes: int, seconds: float = 0.0) -> bool:
    """Whether a checkpoint within an epoch is due, so many pushes and seconds after the one before.

    >>> [snapshot_due(Settings(snapshot_pushes=5), pushes, 10.0) for pushes in (4, 5)]
    [False, True]
    >>> snapshot_due(Settings(), 0, 60.0)
    True
    """
    return 0 < settings.snapshot_pushes <= pushes or 0 < settings.snapshot_seconds <= seconds


class SnapshotTimer:
    """Sets the clock for the next checkpoint within an epoch, once there is a push to keep."""

    def __init__(self) -> None:
        self._set = False

    def start(self, settings: Settings, pushes: int) -> list[Effect]:
        """Set it, where it is not and any were made."""
        if self._set or not (settings.snapshot_seconds and pushes):
            return []
        self._set = True
        return [Wake(settings.snapshot_seconds, CheckpointDue())]

    def woke(self) -> None:
        """It has rung."""
        self._set = False
