"""Explanation of a job's end: the roles that died, their last states, and the remedy for the user."""

from __future__ import annotations

import msgspec

from distbelief.core import roles
from distbelief.core.records import Cause, Finished, Outcome, cause_of
from distbelief.errors import Interrupted, JobFailed


class Explanation(msgspec.Struct):
    """Explanation of the deaths in one job, and the checkpoint from which the job can continue."""

    checkpoint: int = 0
    """Number of the newest checkpoint; 0 where there is none."""
    run: str = ""
    """Path of the run folder; "" where there is none."""
    reported_loss: str = ""
    """First report from a role that failed only because another role was gone."""
    deaths: dict[str, str] = {}
    """Description of each role's last death, except the deaths that were intended."""
    _last_words: dict[str, str] = {}

    def error(self, finished: Finished | None, started: bool) -> JobFailed | None:
        """Return the error for a job's end; None if it ended well. `finished` is None if the job reported no end."""
        if finished is None:
            return self.explain(self.reported_loss or "the job ended without a result")
        if finished.outcome is Outcome.FAILED:
            return self.explain(finished.reason, finished.role)
        never_began = finished.outcome is Outcome.INTERRUPTED and not started
        return Interrupted("interrupted before the job began") if never_began else None

    def cause(self, error: BaseException) -> Cause:
        """Return the cause of a job's failure, given the error that ended it."""
        return Cause.COORDINATOR_DIED if roles.COORDINATOR in self.deaths else cause_of(error)

    def explain(self, reason: str, role: str = "") -> JobFailed:
        """Return the error for a failed job, with the roles that are gone and the way each ended.

        `role` is the role whose death is the cause; "" if none.
        """
        for one in (roles.COORDINATOR, role):
            if one in self.deaths:
                return self.gone(one)
        deaths = "; ".join(told for one, how in self.deaths.items() if (told := f"{one}: {how}") not in reason)
        return self.failed(f"{reason} ({deaths})" if deaths else reason) if self.deaths else JobFailed(reason)

    def repeats(self, role: str, said: str) -> bool:
        """Return whether this life of a role failed with the same text as the one before."""
        before, self._last_words[role] = self._last_words.get(role), said
        return bool(said) and said == before

    def gone(self, role: str) -> JobFailed:
        """Return the error for a job that cannot go on without a role."""
        return self.failed(f"{role} is gone: {self.deaths[role]}")

    def failed(self, what: str, kind: type[JobFailed] = JobFailed) -> JobFailed:
        """Return the error for a job that ends for this reason, with the remedy for the user."""
        error = kind(f"{what}; {self.remedy}")
        error.run = self.run if self.checkpoint else ""
        return error

    @property
    def remedy(self) -> str:
        """Remedy for the user."""
        if self.checkpoint:
            return f"go on from checkpoint {self.checkpoint} with --resume"
        return "there is no checkpoint yet to go on from: start anew"
