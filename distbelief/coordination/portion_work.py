"""Work as most strategies deal it: portions of the training set, whose minibatches are reported in steps."""

from __future__ import annotations

import math
from functools import partial

from distbelief.coordination.coordinator import Coordinator, Handlers
from distbelief.coordination.dealing import DataDealer, Dealing
from distbelief.core import records
from distbelief.core.conversations import dealing, membership
from distbelief.core.conversations.phases import May
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.outcomes import Cause
from distbelief.errors import RemoteProtocolError


class PortionWork:
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
        return job.data.deal(job.membership.members, withheld, self._before(job, job.data))

    def defers(self) -> bool:
        """Never."""
        return False

    def again(self, shard: str) -> list[Effect]:
        """Nothing: replicas push again what was lost."""
        return []

    def end(self, job: Coordinator) -> list[Effect]:
        """Nothing is to be undone."""
        return []

    def _before(self, job: Coordinator, data: DataDealer) -> float:
        """Minibatches that are still to be done before a measure or a checkpoint is due by them."""
        settings = job.settings
        every = settings.strategy.pushing.push_every
        cadences = (
            (settings.evaluations.minibatches, job.evaluations.minibatches.done),
            (settings.snapshots.minibatches, data.minibatches),
            (settings.snapshots.pushes * every, data.pushes * every),
        )
        return min((whole - done for whole, done in cadences if whole), default=math.inf)

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
        return effects + self._go_on(job, data, completed, event.steps - len(event.dropped))

    def _ended(self, job: Coordinator, sender: str, event: dealing.StreamEnded) -> list[Effect]:
        data = self._told(job, sender)
        return [] if data is None else self._go_on(job, data, data.end(sender, event))

    def _told(self, job: Coordinator, sender: str) -> Dealing | None:
        """Return the data that a replica's message counts for; None where it is of the past.

        Raises:
            RemoteProtocolError: it is no member.
        """
        if sender not in job.membership.members or not isinstance(job.data, Dealing):
            raise RemoteProtocolError(f"{sender} reports progress and is no member")
        return job.data if job.membership.heeds(sender) else None

    def _go_on(self, job: Coordinator, data: Dealing, epochs: int, applied: int = 0) -> list[Effect]:
        """Do what is next, now that so many more epochs are done, and minibatches applied."""
        effects = [effect for _ in range(epochs) for effect in job.epoch_done(data)]
        if not data.finished:
            effects += job.measure_in_time(applied)
        if not job.may(May.DEAL):
            return effects
        if data.finished:
            return effects + job.finish(Cause.EPOCHS_DONE, "all epochs are done")
        armed, due = job.saving.in_time(data)
        return [*effects, *job.deal(), *job.write(), *armed, *(job.save() if due else [])]
