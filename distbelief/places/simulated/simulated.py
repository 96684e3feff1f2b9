"""Simulated cluster: every role of a job in one process, on virtual time, from one seed.

The roles and the driver run the code of a real job; only the clock and the network differ. With `phantom` nothing is
computed, and payloads have a length but no bytes, so that thousands of replicas fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.places.simulated.virtual_cluster import VirtualCluster
from distbelief.places.view import View


@dataclass(frozen=True)
class Simulated(VirtualCluster):
    """Virtual cluster that runs jobs.

    >>> import distbelief as db
    >>> result = db.run(db.Job(task="digits", strategy=db.Downpour(replicas=4)), on=Simulated())
    >>> result["steps"], round(result["staleness"]["mean"], 1)
    (23, 2.7)
    """

    def run(self, job: Job, view: View | None = None) -> Json:
        """Run a job to its end; return the content of `result.json`, with `seconds` of virtual time.

        Raises:
            UsageError: an option has an impossible value, or no meaning here.
            JobFailed: every replica died, or Ctrl-C came twice; after the first, the job ends in order.
        """
        settings = self.settings(job)
        if isinstance(view, View):
            view.show_start()
        from distbelief.places.simulated.running import run

        return run(self, job, settings, view)
