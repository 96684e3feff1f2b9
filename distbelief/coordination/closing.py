"""End of a job: its cause, and the last steps, which are taken once its replicas have nothing more to do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from distbelief.core import records
from distbelief.core.conversations import checkpointing
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.outcomes import Cause, Outcome


class ClosingStep(StrEnum):
    """The last steps of a job, in their order."""

    MEASURE = "measure"
    SAVE = "save"
    DESCRIBE = "describe"
    STOP = "stop"


class Closing:
    """The end of a job: why it ends, the last steps that are left, and who has not accounted for what it holds."""

    def __init__(self) -> None:
        self.cause, self.reason = Cause.EPOCHS_DONE, ""
        self.steps: list[ClosingStep] = []
        self.describing: set[str] = set()
        self._interrupted = ""

    def begin(self, cause: Cause, reason: str) -> None:
        """The job is to end: all the last steps are to be taken; but who interrupts it waits for no measure."""
        self.cause, self.reason = cause, reason
        self.steps = [step for step in ClosingStep if step is not ClosingStep.MEASURE or cause is not Cause.INTERRUPTED]

    def describe(self, holders: Iterable[str]) -> list[Effect]:
        """Have those who hold the parameters account for them."""
        self.describing = set(holders)
        return [Send(role, checkpointing.Describe()) for role in holders]

    def interrupt(self, reason: str) -> list[Effect]:
        """Somebody asks that the job end which is ending already: that counts where there is work again."""
        self._interrupted = reason
        return []

    def go_back(self) -> tuple[bool, list[Effect]]:
        """All go back to a checkpoint as the job ends; returns whether they train again, and what is told of it.

        They do where all was done, or a target reached: what had done so is lost.
        """
        if self.cause.outcome not in (Outcome.DONE, Outcome.TARGET):
            return False, []
        if not self._interrupted:
            return True, []
        self.cause, self.reason = Cause.INTERRUPTED, self._interrupted
        return False, [WriteRecord(records.Ending.of(self.cause, self.reason))]
