"""Work of most strategies: portions of the training set, whose minibatches the replicas report as steps."""

from __future__ import annotations

from functools import partial

from distbelief.coordination.coordinator import Coordinator, DealtWork
from distbelief.coordination.dealing import Dealing
from distbelief.core import records
from distbelief.core.conversations import dealing, membership
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.records import Cause
from distbelief.errors import RemoteProtocolError
from distbelief.server.machine import Handlers


class PortionWork(DealtWork):
    """Dealer of a job's data in portions; see `coordination.coordinator.DealtWork`."""

    forgotten = True
    """Always true: the state is in the job's `data`."""

    def handlers(self, job: Coordinator) -> Handlers:
        return {dealing.Progress: partial(self._progress, job), dealing.StreamEnded: partial(self._ended, job)}

    def begin(self, job: Coordinator) -> Dealing:
        assert job.plan is not None
        return Dealing(job.plan, job.saving.position, job.saving.samples, job.brought, job.registry.over)

    def deal(self, job: Coordinator) -> list[Effect]:
        if not isinstance(job.data, Dealing):
            return []
        if job.data.finished:  # the replica with the last minibatches was given up, or has joined with none left
            return job.finish(Cause.EPOCHS_DONE, "all epochs are done")
        if job.shards.counts_gone:
            # a coming round may hold a push from a lost replica; dealt again, its minibatches would count twice
            return []
        withheld = job.saving.holds and job.settings.strategy.one_moment
        before = job.until_due(job.data, job.settings.strategy.pushing.push_steps)
        return job.data.deal(job.membership.members, withheld, before)

    def _progress(self, job: Coordinator, sender: str, event: dealing.Progress) -> list[Effect]:
        data = self._data(job, sender)
        if data is None:
            return []
        if event.start is not None and (why := data.differs(sender, event.start)):
            return [Send(sender, membership.Refused(why))]
        completed = data.report(sender, event)
        loss = event.loss / event.losses if event.losses else None
        dropped = len(event.dropped)
        effects: list[Effect] = [
            WriteRecord(records.Stepped(sender, event.steps, event.samples, event.pushes, loss, dropped, event.losses))
        ]
        return effects + job.applied(data, completed, event.steps - len(event.dropped))

    def _ended(self, job: Coordinator, sender: str, event: dealing.StreamEnded) -> list[Effect]:
        data = self._data(job, sender)
        return [] if data is None else job.applied(data, data.end(sender, event))

    def _data(self, job: Coordinator, sender: str) -> Dealing | None:
        """Return the job's data; None if a replica's report is about work before a rewind."""
        if sender not in job.membership.members or not isinstance(job.data, Dealing):
            raise RemoteProtocolError(f"{sender} reports progress but is no member")
        return job.data if job.membership.heeds(sender) else None
