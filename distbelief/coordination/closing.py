"""End of a job: its cause, and its last steps, which begin once the replicas are done."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from distbelief.core import records
from distbelief.core.conversations import checkpointing
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.records import Cause, Outcome


class ClosingStep(StrEnum):
    """Last steps of a job, in order."""

    MEASURE = "measure"
    SAVE = "save"
    DESCRIBE = "describe"
    STOP = "stop"


class Closing:
    """End of a job: its cause, the remaining steps, and the roles whose accounts are missing."""

    def __init__(self) -> None:
        self.cause, self.reason = Cause.EPOCHS_DONE, ""
        self.steps: list[ClosingStep] = []
        self.describing: set[str] = set()
        self._interrupted = ""

    def begin(self, cause: Cause, reason: str) -> None:
        """Begin the end of a job with all last steps; an interrupted job is not measured."""
        self.cause, self.reason = cause, reason
        self.steps = [step for step in ClosingStep if step is not ClosingStep.MEASURE or cause is not Cause.INTERRUPTED]

    def describe(self, holders: Iterable[str]) -> list[Effect]:
        """Ask the holders of the parameters for their accounts."""
        self.describing = set(holders)
        return [Send(role, checkpointing.Describe()) for role in holders]

    def interrupt(self, reason: str) -> list[Effect]:
        """Note an interruption of a job that is already ending; it counts if the job goes back to training."""
        self._interrupted = reason
        return []

    def go_back(self) -> tuple[bool, list[Effect]]:
        """Go back to a checkpoint during the end; return whether the job trains again, and the records of it.

        It trains again if it was ending because all was done or a target was reached: those parameters are lost.
        """
        if self.cause.outcome not in (Outcome.DONE, Outcome.TARGET):
            return False, []
        if not self._interrupted:
            return True, []
        self.cause, self.reason = Cause.INTERRUPTED, self._interrupted
        return False, [WriteRecord(records.Ending.of(self.cause, self.reason))]
