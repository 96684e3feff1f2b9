"""Shards as holders of the parameters: how they get their ranges, what replaces a dead shard, and how all go back."""

from __future__ import annotations

from functools import partial

from distbelief.coordination.closing import ClosingStep
from distbelief.coordination.coordinator import Coordinator, Holders
from distbelief.core import events, messages, records, roles
from distbelief.core.conversations import attendance, checkpointing, initialising, membership, mirroring
from distbelief.core.conversations.phases import May, Phase
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.records import Cause
from distbelief.server.machine import Handlers


class ShardHolders(Holders):
    """Shards of a job, and their standbys; see `coordination.coordinator.Holders`."""

    forgotten = True
    """Always true: the state is in the job's `shards` and `standbys`."""

    def handlers(self, job: Coordinator) -> Handlers:
        return {
            membership.Here: partial(self._here, job),
            initialising.Restored: partial(self._restored, job),
            initialising.Ready: partial(self._ready, job),
            attendance.Departed: partial(self._departed, job),
            mirroring.Stands: lambda sender, event: job.standbys.stands(sender, event.incarnation),
            mirroring.Mirrored: lambda sender, event: job.standbys.mirrored(sender, event.incarnation),
            mirroring.StandbyLost: lambda sender, event: job.standbys.unreachable(sender, event.incarnation),
        }

    def roles(self, job: Coordinator) -> list[str]:
        return job.shards.roles

    def _here(self, job: Coordinator, sender: str, event: membership.Here) -> list[Effect]:
        job.registry.begin(sender, event.incarnation)
        place = messages.Address(event.address, event.incarnation)
        if roles.kind(sender) is roles.Kind.STANDBY:
            job.standbys.here(sender, place)
            return self._pair(job)
        return self.restore(job) if job.shards.here(sender, place) else []

    def _pair(self, job: Coordinator) -> list[Effect]:
        """Have standbys follow their shards, once these hold their ranges."""
        return job.standbys.pair(job.plan) if job.plan is not None and job.may(May.REPLACE) else []

    def restore(self, job: Coordinator) -> list[Effect]:
        """Tell the shards their ranges, once the layout is known; all at once if they begin together."""
        if job.plan is None:
            return []
        members = job.membership.known() if job.may(May.REPLACE) else ()
        together = job.may(May.GATHER) or job.settings.strategy.one_moment
        effects = job.shards.restore(job.plan, job.saving.newest, members, together)
        if not effects:
            return []
        if job.may(May.GATHER):
            job.enter(Phase.RESTORING)
        return effects + job.shards.tell_gone(job.plan, job.registry.gone)

    def _restored(self, job: Coordinator, sender: str, event: initialising.Restored) -> list[Effect]:
        if not job.shards.holds(sender, event.lasts):
            return []
        again = job.work.again(sender)
        if not job.shards.ready:
            return again
        if job.may(May.LOAD):
            if event.loaded:
                return again + job.begin()
            job.enter(Phase.INITIALISING)
        if job.may(May.INITIALISE):
            return again + self.initialise(job)
        if sender in job.closing.describing:
            again.append(Send(sender, checkpointing.Describe()))
        return [*again, *job.greet(), *self._pair(job), *job.go_on()]

    def initialise(self, job: Coordinator) -> list[Effect]:
        first = job.membership.initialiser() if job.may(May.INITIALISE) and job.shards.ready else None
        return job.welcome(first, initialise=True) if first else []

    def _ready(self, job: Coordinator, sender: str, event: initialising.Ready) -> list[Effect]:
        there = job.shards.ready and list(event.shards) == [place.incarnation for place in job.shards.places]
        return job.begin() if there and job.may(May.INITIALISE) else []

    def _departed(self, job: Coordinator, _: str, event: attendance.Departed) -> list[Effect]:
        job.shards.departed(event.who, event.incarnation)
        return job.deal()

    def lost(self, job: Coordinator, role: str, event: events.Lost) -> list[Effect]:
        """Replace a dead shard by its standby, or start it again from memory or a checkpoint; else end the job."""
        if roles.kind(role) is roles.Kind.STANDBY:
            return job.standbys.lost(role, event.incarnation, event.reason)
        if roles.kind(role) is not roles.Kind.SHARD or not job.registry.end(role, event.incarnation, died=True):
            return []
        incarnation = job.registry.last_gone(role)
        if not job.shards.gone(role, incarnation):
            return []
        # The best remaining source is used: a standby, which holds every acknowledged push; the shard's own memory, if
        # that outlives it; or the newest checkpoint. If all shards must be at the same moment, a death without a
        # standby takes all of them back. A checkpoint under way is given up, since one of its parts is lost.
        begun, what = job.may(May.REPLACE), f"{role} is gone ({event.reason})"
        if job.may(May.CLOSE) and job.saving.holds:
            job.closing.steps.insert(0, ClosingStep.SAVE)
        if job.standbys.can_succeed(role):
            note = records.Note(f"{what}; its standby takes its place")
            return [WriteRecord(note), *job.give_up(what), *job.standbys.succeed(role)]
        job.standbys.alone(role)
        if cause := self._ends(job, role, begun):
            return job.end(cause, job.saving.unsaved(what), role)
        effects = job.give_up(what)
        whose = "its memory" if job.shards.lasts(role) else f"checkpoint {job.saving.kept}"
        if begun and job.settings.strategy.one_moment:
            note = records.Note(f"{what}; all go back to {whose}")
            return [WriteRecord(note), *effects, *self._rewind(job), *job.shards.fall()]
        goes_on = f" and goes on from {whose}" if begun or job.may(May.CLOSE) else ""
        note = records.Note(f"{what}; another takes its place{goes_on}")
        return [WriteRecord(note), *effects, job.shards.grant(role, incarnation + 1)]

    def _ends(self, job: Coordinator, role: str, begun: bool) -> Cause | None:
        """Return why the job ends after the death of a shard without a standby; None if it continues."""
        if role in job.registry.over:
            return Cause.SHARD_SPENT
        if job.shards.lasts(role):
            return None
        if job.may(May.CLOSE):
            return Cause.SHARD_CLOSING
        return Cause.SHARD_UNSAVED if begun and not job.saving.newest else None

    def _rewind(self, job: Coordinator) -> list[Effect]:
        """Take the job back to the newest checkpoint: every shard loads it, and every replica begins again."""
        job.membership.go_back()
        job.standbys.alone(*job.shards.roles)
        data = job.return_to_checkpoint()
        again, notes = job.closing.go_back() if job.may(May.AWAIT) else (False, [])
        if again:
            job.enter(Phase.TRAINING)
        return [WriteRecord(records.Rewound(data.samples, job.epochs)), *notes]
