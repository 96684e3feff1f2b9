"""Who of a job has died and how, and what is to be told of it when the job fails."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.outcomes import Cause, Outcome, cause_of
from distbelief.core.records import Finished
from distbelief.errors import DistbeliefError, Interrupted, JobFailed


class Obituary:
    """The deaths of one job.

    Args:
        checkpoint: number of the newest checkpoint; 0 where there is none.
        run: the run folder, "" where there is none.
    """

    def __init__(self, checkpoint: int, run: str) -> None:
        self.run, self.checkpoint = run, checkpoint
        """What the job can go on from."""
        self.rumour = ""
        """What the first process said that told only of somebody else who is gone."""
        self.deaths: dict[str, str] = {}
        self._last_words: dict[str, str] = {}

    def error(self, finished: Finished | None, started: bool) -> JobFailed | None:
        """The error for how a job has ended, or (None) for one that has never said how; None where it ended well."""
        if finished is None:
            return self.explain(self.rumour or "the job ended without a result")
        if finished.outcome is Outcome.FAILED:
            return self.explain(finished.reason, finished.role)
        return None if started or finished.outcome is not Outcome.INTERRUPTED else Interrupted("interrupted before the job began")

    def cause(self, error: DistbeliefError) -> Cause:
        """Why a job failed that an error has ended."""
        return Cause.COORDINATOR_DIED if roles.COORDINATOR in self.deaths else cause_of(error)

    def explain(self, reason: str, role: str = "") -> JobFailed:
        """The error for a job that failed: who is gone, and how it ended; `role` is the one whose death is the cause, where one's is."""
        for one in (roles.COORDINATOR, role):
            if one in self.deaths:
                return self.gone(one)
        deaths = "; ".join(f"{role}: {how}" for role, how in self.deaths.items())
        return self.failed(f"{reason} ({deaths})") if deaths else JobFailed(reason)

    def repeats(self, role: str, said: str) -> bool:
        """Whether a life of a role has failed with the words of the last."""
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
        """What the user can do."""
        return f"go on from checkpoint {self.checkpoint} with --resume" if self.checkpoint else "there is no checkpoint yet to go on from: start anew"
