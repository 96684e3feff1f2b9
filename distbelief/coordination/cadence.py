"""Cadence of a job: when it measures and saves, and whether its target is reached or its budget spent."""

from __future__ import annotations

import math

from distbelief.core.records import Tested
from distbelief.core.settings import Settings


def is_due(every: int, done: int) -> bool:
    """Return whether something due at intervals of `every` epochs (0 for never) is due now.

    >>> is_due(2, 4), is_due(2, 5), is_due(0, 4)
    (True, False, False)
    """
    return every > 0 and done % every == 0


class Target:
    """Target of a job, which two evaluations in a row must reach."""

    def __init__(self) -> None:
        self._held = False
        """True if the last evaluation reached it."""

    def reached(self, settings: Settings, tested: Tested) -> str:
        """Return a sentence once this evaluation and the one before have reached the target; else "".

        >>> target, aimed = Target(), Settings(target_accuracy=0.9)
        >>> target.reached(aimed, Tested(1, 0.3, 0.91)), target.reached(aimed, Tested(2, 0.3, 0.92))
        ('', 'test accuracy 0.9200 reached the target 0.9, as in the evaluation before it')
        """
        before, self._held = self._held, tested.holds(settings.target_accuracy, settings.target_loss)
        if not (before and self._held):
            return ""
        values = {"accuracy": (tested.accuracy, settings.target_accuracy), "loss": (tested.loss, settings.target_loss)}
        parts = [f"test {name} {value:.4f} reached the target {aim}" for name, (value, aim) in values.items() if aim]
        return f"{' and '.join(parts)}, as in the evaluation before it"

    def forget(self) -> None:
        """Forget the last evaluation, whose model is lost."""
        self._held = False


def budget_spent(settings: Settings, seconds: float = math.inf) -> str:
    """Return a sentence if a job's budget of time is spent after these seconds; else "".

    >>> budget_spent(Settings(budget="2s")), budget_spent(Settings(), 5.0)
    ('the budget of 2 s is spent', '')
    """
    budget = settings.budget_seconds
    return f"the budget of {budget:g} s is spent" if 0 < budget <= seconds else ""


def snapshot_due(settings: Settings, pushes: int, seconds: float = 0.0, minibatches: int = 0) -> bool:
    """Return whether a checkpoint is due, given the pushes, seconds and minibatches since the last one.

    >>> [snapshot_due(Settings(snapshot_every="5"), pushes, 10.0) for pushes in (4, 5)]
    [False, True]
    >>> snapshot_due(Settings(), 0, 60.0), snapshot_due(Settings(snapshot_every="9minibatches"), 3, minibatches=9)
    (True, True)
    """
    return (
        0 < settings.snapshots.pushes <= pushes
        or 0 < settings.snapshots.seconds <= seconds
        or 0 < settings.snapshots.minibatches <= minibatches
    )
