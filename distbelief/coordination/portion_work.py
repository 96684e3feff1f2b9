"""Work as most strategies deal it: portions of the training set, whose minibatches are reported in steps."""

from __future__ import annotations

from functools import partial

from distbelief.coordination.coordinator import Coordinator, DealtWork, Handlers
from distbelief.coordination.dealing import Dealing
from distbelief.core import records
from distbelief.core.conversations import dealing, membership
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.outcomes import Cause
from distbelief.errors import RemoteProtocolError


class PortionWork(DealtWork):
    """Deals the data of a job in portions; see `coordination.coordinator.DealtWork`."""

    forgotten = True
    """It holds nothing: what is dealt, the job's `data` knows."""

    def handlers(self, job: Coordinator) -> Handlers:
        """A replica reports what it has done of a portion."""
        return {dealing.Progress: partial(self._progress, job), dealing.StreamEnded: partial(self._ended, job)}

    def begin(self, job: Coordinator) -> Dealing:
        """From where the newest checkpoint stands."""
        assert job.plan is not None
        return Dealing(job.plan, job.saving.position, job.saving.samples, job.brought, job.registry.over)

    def deal(self, job: Coordinator) -> list[Effect]:
        """One portion to each who wants one; where a checkpoint is one moment of all, none while it is made, and what
        was dealt ahead is given back. In rounds none while a round may hold what one has pushed who is gone: it would
        hold a minibatch of his twice that is dealt again.
        """
        if not isinstance(job.data, Dealing):
            return []
        if job.data.finished:  # what was left was that of a replica which will not come again, or has just come
            return job.finish(Cause.EPOCHS_DONE, "all epochs are done")
        if job.shards.counts_gone:
            return []
        withheld = job.saving.holds and job.settings.strategy.one_moment
        before = job.until_due(job.data, job.settings.strategy.pushing.push_every)
        return job.data.deal(job.membership.members, withheld, before)

    def _progress(self, job: Coordinator, sender: str, event: dealing.Progress) -> list[Effect]:
        data = self._told(job, sender)
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
        data = self._told(job, sender)
        return [] if data is None else job.applied(data, data.end(sender, event))

    def _told(self, job: Coordinator, sender: str) -> Dealing | None:
        """Return the data that a replica's message counts for; None where it is of the past.

        Raises:
            RemoteProtocolError: it is no member.
        """
        if sender not in job.membership.members or not isinstance(job.data, Dealing):
            raise RemoteProtocolError(f"{sender} reports progress and is no member")
        return job.data if job.membership.heeds(sender) else None
