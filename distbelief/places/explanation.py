"""Explanation of a job's end: who has died and how, and what the user can do."""

from __future__ import annotations

import msgspec

from distbelief.core import roles
from distbelief.core.outcomes import Cause, Outcome, cause_of
from distbelief.core.records import Finished
from distbelief.errors import Interrupted, JobFailed


class Explanation(msgspec.Struct):
    """Explanation of the deaths of one job, and of what it can go on from."""

    checkpoint: int = 0
    """Number of the newest checkpoint; 0 where there is none."""
    run: str = ""
    """The run folder, "" where there is none."""
    reported_loss: str = ""
    """First word of a role that told only of somebody else who is gone."""
    deaths: dict[str, str] = {}
    """End of the last life of each role, of those that nobody meant to end."""
    _last_words: dict[str, str] = {}

    def error(self, finished: Finished | None, started: bool) -> JobFailed | None:
        """The error for how a job has ended, or (None) for one that has never said how; None where it ended well."""
        if finished is None:
            return self.explain(self.reported_loss or "the job ended without a result")
        if finished.outcome is Outcome.FAILED:
            return self.explain(finished.reason, finished.role)
        never_began = finished.outcome is Outcome.INTERRUPTED and not started
        return Interrupted("interrupted before the job began") if never_began else None

    def cause(self, error: BaseException) -> Cause:
        """Why a job failed that an error has ended."""
        return Cause.COORDINATOR_DIED if roles.COORDINATOR in self.deaths else cause_of(error)

    def explain(self, reason: str, role: str = "") -> JobFailed:
        """The error for a job that failed: who is gone, and how it ended.

        Args:
            reason: why it failed.
            role: the one whose death is the cause, where one's is.
        """
        for one in (roles.COORDINATOR, role):
            if one in self.deaths:
                return self.gone(one)
        deaths = "; ".join(told for one, how in self.deaths.items() if (told := f"{one}: {how}") not in reason)
        return self.failed(f"{reason} ({deaths})" if deaths else reason) if self.deaths else JobFailed(reason)

    def repeats(self, role: str, said: str) -> bool:
        """Return whether a life of a role has failed with the words of the last."""
        before, self._last_words[role] = self._last_words.get(role), said
        return bool(said) and said == before

    def gone(self, role: str) -> JobFailed:
        """The error for a job that cannot go on without a role."""
        return self.failed(f"{role} is gone: {self.deaths[role]}")

    def failed(self, what: str, kind: type[JobFailed] = JobFailed) -> JobFailed:
        """The error for a job that this has ended, with what the user can do."""
        error = kind(f"{what}; {self.remedy}")
        error.run = self.run if self.checkpoint else ""
        return error

    @property
    def remedy(self) -> str:
        """Return what the user can do."""
        if self.checkpoint:
            return f"go on from checkpoint {self.checkpoint} with --resume"
        return "there is no checkpoint yet to go on from: start anew"
