"""Who of a job has died and how, and what is to be told of it when the job fails."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.errors import JobFailed


class Obituary:
    """The deaths of one job.

    Args:
        checkpoint: number of the newest checkpoint; 0 where there is none.
    """

    def __init__(self, checkpoint: int) -> None:
        self.checkpoint = checkpoint
        """What the job can go on from."""
        self.rumour = ""
        """What the first process said that told only of somebody else who is gone."""
        self.deaths: dict[str, str] = {}

    def explain(self, reason: str) -> JobFailed:
        """The error for a job that failed: who is gone, and how it ended."""
        for role in self.deaths:
            if role == roles.COORDINATOR or reason.startswith(f"{role} is gone"):
                return self.gone(role)
        deaths = "; ".join(f"{role}: {how}" for role, how in self.deaths.items())
        return JobFailed(f"{reason} ({deaths}); {self.remedy}" if deaths else reason)

    def gone(self, role: str) -> JobFailed:
        """The error for a job that cannot go on without a role."""
        return JobFailed(f"{role} is gone: {self.deaths[role]}; {self.remedy}")

    @property
    def remedy(self) -> str:
        """What the user can do."""
        return f"go on from checkpoint {self.checkpoint} with --resume" if self.checkpoint else "there is no checkpoint yet to go on from: start anew"
