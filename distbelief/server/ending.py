"""How a job with a server ends: why, and the last steps, which are taken once its replicas are gone."""

from __future__ import annotations

from enum import StrEnum

from distbelief.core import records
from distbelief.core.effects import Effect, Record
from distbelief.core.outcomes import Cause, Outcome


class ClosingStep(StrEnum):
    """The last steps of a job, in their order."""

    MEASURE = "measure"
    SAVE = "save"
    DESCRIBE = "describe"
    STOP = "stop"


class Why:
    """Why a job ends, once it does."""

    def __init__(self) -> None:
        self.cause, self.reason = Cause.EPOCHS_DONE, ""
        self._interrupted = ""

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
        return False, [Record(records.Ending.of(self.cause, self.reason))]
