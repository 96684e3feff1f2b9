"""The simulated cluster: every role of a job in one process, on virtual time, from one seed.

The machines and stories are those of a real job, and so is the driver; only the clock and the network are others. With
`phantom` nothing is computed and payloads know only their length, so that thousands of replicas fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.places.simulated.virtual_cluster import VirtualCluster
from distbelief.places.view import View


@dataclass(frozen=True)
class Simulated(VirtualCluster):
    """A virtual cluster.

    >>> import distbelief as db
    >>> result = db.run(db.Job(task="digits", strategy=db.Downpour(replicas=4)), on=Simulated())
    >>> result["steps"], round(result["staleness"]["mean"], 1)
    (23, 2.7)
    """

    def run(self, job: Job, view: View | None = None) -> Json:
        """Run a job to its end; returns what `result.json` holds, with `seconds` of virtual time.

        Raises:
            UsageError: an option cannot be, or has no meaning here.
            JobFailed: every replica died, or Ctrl-C came twice; the first lets the job end in peace.
        """
        settings = self.settings(job)
        if view:
            view.show_start()
        from distbelief.places.simulated.running import run

        return run(self, job, settings, view)
