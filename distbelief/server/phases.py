"""The phases of a job, what the coordinator waits for in each, and why the job ends."""

from __future__ import annotations

from typing import Literal

from distbelief.core import records
from distbelief.core.effects import Effect, Record
from distbelief.core.outcomes import Cause, Outcome

Phase = Literal["gathering", "restoring", "initialising", "training", "leaving", "closing"]

PHASES: dict[Phase, str] = {
    "gathering": "waits for all shards, and for the first replica, which tells the layout",
    "restoring": "waits for the shards to know their ranges, and to load a checkpoint if there is one",
    "initialising": "waits for one replica to send the initial parameters",
    "training": "deals portions until all are done, a target is reached or somebody stops the job",
    "leaving": "waits for the replicas to push what they have accrued, and to leave",
    "closing": "waits for the last evaluation, the last checkpoint and the shards' accounts",
}
"""What the coordinator does, and what it waits for, in order."""


class Why:
    """Why a job ends, once it does."""

    def __init__(self) -> None:
        self.cause, self.reason = Cause.EPOCHS_DONE, ""
        self._interrupted = ""

    def interrupt(self, reason: str) -> list[Effect]:
        """Somebody asks that the job end which is ending already: that counts where there is work again."""
        self._interrupted = reason
        return []

    def go_back(self, phase: Phase) -> tuple[Phase, list[Effect]]:
        """All go back to a checkpoint in this phase; returns that in which they go on, and what is told of it."""
        if phase != "leaving" or self.cause.outcome is not Outcome.DONE:
            return phase, []
        if not self._interrupted:
            return "training", []
        self.cause, self.reason = Cause.INTERRUPTED, self._interrupted
        return phase, [Record(records.Ending.of(self.cause, self.reason))]
