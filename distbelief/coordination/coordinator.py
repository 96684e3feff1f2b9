"""The coordinator: the machine that knows the members, deals portions, and calls for evaluations, checkpoints and the
end.

It never sees the parameter vector. A job goes through the phases of `PHASES`, and each `_on_<message>` below says what
moves it on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from distbelief.coordination import admission
from distbelief.coordination.cadence import is_due, target_reached
from distbelief.coordination.closing import Closing, ClosingStep
from distbelief.coordination.dealing import DataDealer, Dealing
from distbelief.coordination.evaluations import Evaluations
from distbelief.coordination.membership import Membership
from distbelief.coordination.saving import Saving
from distbelief.coordination.shard_registry import ShardRegistry
from distbelief.coordination.standbys import Standbys
from distbelief.core import events, messages, records, roles
from distbelief.core.conversations import checkpointing, dealing, evaluating, initialising, membership, mirroring
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.phases import ALLOWED, PHASES, May, Phase
from distbelief.core.effects import Effect, End, Send, WriteRecord
from distbelief.core.outcomes import Cause
from distbelief.core.portions import START, Position
from distbelief.core.protocol import SERVED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Holder, Plan, Settings
from distbelief.errors import LayoutError, RemoteProtocolError, UsageError
from distbelief.server.machine import Answering, Answers


class Coordinator(Answering):
    """The coordinator of one job.

    Args:
        settings: of the job; every replica is told them.
        evaluator: whether an evaluator takes part.
        checkpoint: what the shards load, or "" for a fresh job.
        position: where the data of that checkpoint stands.
        samples: samples that were done before it.
        number: of the next checkpoint.
    """

    heard = heard_by(Kind.COORDINATOR, SERVED)

    def __init__(
        self,
        settings: Settings,
        evaluator: bool = True,
        checkpoint: str = "",
        position: Position = START,
        samples: int = 0,
        number: int = 1,
    ) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.plan: Plan | None = None
        self.data: DataDealer | None = None
        self._evaluations = Evaluations(evaluator)
        self._saving = Saving(settings, number, checkpoint, position, samples)
        self._shards = ShardRegistry(settings.shards if settings.strategy.held_by is Holder.SHARDS else 0)
        self._membership = Membership(settings.restarts)
        self._standbys = Standbys(settings, self._shards, self._membership.lives)
        self._closing = Closing()
        answers: dict[type, Callable[..., list[Effect]]] = {
            membership.Here: self._on_here,
            membership.Join: self._on_join,
            membership.Rejoin: self._on_rejoin,
            membership.Anew: lambda sender, event: self._membership.begun(sender, event.generation),
            checkpointing.Held: lambda sender, event: self._saving.held(sender, event.number) or self._write(),
            initialising.Restored: self._on_restored,
            mirroring.Stands: lambda sender, event: self._standbys.stands(sender, event.life),
            mirroring.Mirrored: lambda sender, event: self._standbys.mirrored(sender, event.life),
            mirroring.Bereft: lambda sender, event: self._standbys.bereft(sender, event.life),
            initialising.Ready: self._on_ready,
            membership.Leave: self._on_leave,
            evaluating.Evaluated: self._on_evaluated,
            checkpointing.SnapshotDone: self._on_snapshot,
            events.Saved: self._on_saved,
            checkpointing.Description: self._on_description,
            membership.Stop: self._on_stop,
            events.Woke: self._on_woke,
            events.Lost: self._on_lost,
            **self._take_work(),
        }
        self._answers = Answers("the coordinator", self.heard, answers)

    def _take_work(self) -> Mapping[type, Callable[..., list[Effect]]]:
        """How it answers to those who have done some of what they were dealt."""
        return {dealing.Progress: self._on_progress}

    def waits(self) -> str:
        """What the job waits for now, in one sentence: for whoever wonders why nothing happens."""
        who = self._shards.waits() or sorted(self._closing.describing)
        if not self._shards.unready and self._may(May.REPLACE) and self.data is not None:
            who = self.data.waiting(self._membership.members) or sorted(self._membership.members, key=roles.index_of)
        who = who or [roles.EVALUATOR] * self._evaluations.pending
        return f"{self.phase}: {PHASES.meaning[self.phase]}" + (f" ({', '.join(who)})" if who else "")

    def standing(self) -> dict[str, object]:
        """What it has dealt, by role."""
        return {
            "phase": self.phase,
            "of": {role: {"minibatches": self.data.held(role)} for role in self._membership.members if self.data},
        }

    @property
    def epochs(self) -> int:
        """How many are done."""
        return self.data.epochs if self.data else 0

    @property
    def _holders(self) -> list[str]:
        """Who holds the parameters, saves them and accounts for them."""
        return self._shards.roles

    @property
    def _busy(self) -> Collection[str]:
        """Members that have not left."""
        return self._membership.members

    def _may(self, act: May) -> bool:
        """Whether the phase allows it."""
        return act in ALLOWED[self.phase]

    def _enter(self, phase: Phase) -> None:
        self.phase = PHASES.move(self.phase, phase)

    def _continue(self) -> list[Effect]:
        """Do what is next, now that something has changed."""
        if self._may(May.INITIALISE):
            return self._ask_to_initialise()
        return [*self._deal(), *self._write()] if self._may(May.DEAL) else self._close()

    # joining

    def _on_here(self, sender: str, event: membership.Here) -> list[Effect]:
        self._membership.lives.begin(sender, event.incarnation)
        place = messages.Address(event.address, event.incarnation)
        if roles.kind(sender) is roles.Kind.STANDBY:
            self._standbys.here(sender, place)
            return self._pair()
        return self._restore() if self._shards.here(sender, place) else []

    def _pair(self) -> list[Effect]:
        """Have standbys follow their shards, once these hold what they are to hold."""
        return self._standbys.pair(self.plan) if self.plan is not None and self._may(May.REPLACE) else []

    def _on_join(self, sender: str, event: membership.Join) -> list[Effect]:
        self._membership.lives.begin(sender, event.incarnation)
        if sender == roles.EVALUATOR:
            self._evaluations.comes()
            self._membership.wait(sender)
            return self._greet() if self._may(May.WELCOME) else []
        try:
            if self.plan is None:
                self.plan = admission.plan(self.settings, event)
                self.settings, self.data = self.plan.settings, self._dealing(self.plan)
                self._membership.wait(sender)
                return self._restore()
            admission.check(self.plan, sender, event)
        except (LayoutError, UsageError) as error:
            return [Send(sender, membership.Refused(str(error), isinstance(error, LayoutError)))]
        if self._may(May.DISMISS):
            return [Send(sender, membership.Finish("the job is ending"))]
        self._membership.wait(sender)
        return self._greet() if self._may(May.DEAL) else self._ask_to_initialise()

    def _dealing(self, plan: Plan) -> DataDealer:
        return Dealing(plan, self._saving.position, self._saving.samples)

    def _restore(self) -> list[Effect]:
        """Tell shards that are there their ranges: once the layout is known and, where they begin together, once all of
        them are there.
        """
        if self.plan is None:
            return []
        members = self._membership.known() if self._may(May.REPLACE) else ()
        together = self._may(May.GATHER) or self.settings.strategy.one_moment
        effects = self._shards.restore(self.plan, self._saving.newest, members, together)
        if not effects:
            return []
        if self._may(May.GATHER):
            self._enter(Phase.RESTORING)
        return effects + self._shards.tell_gone(self.plan, self._membership.lives.gone)

    def _on_restored(self, sender: str, event: initialising.Restored) -> list[Effect]:
        if not self._shards.holds(sender) or not self._shards.ready:
            return []
        if self._may(May.LOAD):
            if event.loaded:
                return self._begin()
            self._enter(Phase.INITIALISING)
        if self._may(May.INITIALISE):
            return self._ask_to_initialise()
        asked: list[Effect] = [Send(sender, checkpointing.Describe())] if sender in self._closing.describing else []
        return [*asked, *self._greet(), *self._pair(), *self._continue()]

    def _ask_to_initialise(self) -> list[Effect]:
        """Welcome the first replica that waits, which sends the shards its parameters; one that has begun to begins
        anew.
        """
        first = self._membership.initialiser() if self._may(May.INITIALISE) and self._shards.ready else None
        return self._greet_one(first, initialise=True) if first else []

    def _on_ready(self, sender: str, event: initialising.Ready) -> list[Effect]:
        there = self._shards.ready and list(event.shards) == [place.incarnation for place in self._shards.places]
        return self._begin() if there and self._may(May.INITIALISE) else []

    def _begin(self) -> list[Effect]:
        assert self.plan is not None and self.data is not None  # noqa: PT018
        self._enter(Phase.TRAINING)
        effects: list[Effect] = [
            WriteRecord(admission.started(self.plan, self.data.samples, self.epochs)),
            *self._greet(),
            *self._pair(),
        ]
        if self.data.finished:
            return effects + self._finish(Cause.DONE_BEFORE, "every epoch was done before")
        # for a shard that dies to go back to
        return effects + (self._save() if self.settings.snapshots and not self._saving.newest else [])

    def _on_rejoin(self, sender: str, event: membership.Rejoin) -> list[Effect]:
        if sender not in self._membership.members and (sender != roles.EVALUATOR or not self._evaluations.there):
            raise RemoteProtocolError(f"{sender} comes back, and is no member")
        self._membership.stray(sender)
        return self._shards.doubt(event.lost) + (
            self._ask_to_initialise() if self._may(May.INITIALISE) else self._greet()
        )

    def _greet(self) -> list[Effect]:
        """Welcome those who wait for it, once the shards are there."""
        return [
            effect
            for role in (self._membership.callers() if self._shards.sure else ())
            for effect in self._greet_one(role)
        ]

    def _greet_one(self, role: str, initialise: bool = False) -> list[Effect]:
        assert self.plan is not None
        effects: list[Effect] = [
            Send(
                role, membership.Welcome(self.plan, initialise, self._shards.places, self._membership.generation(role))
            )
        ]
        if role == roles.EVALUATOR:
            return effects + (self._evaluations.joined(self.epochs) if not self._evaluations.there else [])
        if self._saving.holds and not self.settings.strategy.one_moment:
            effects.append(self._saving.hold(role))
        if self._may(May.DISMISS):
            effects.append(Send(role, membership.Finish(self._closing.reason)))
        if self._membership.admit(role):
            effects.append(WriteRecord(records.Joined(role)))
        return effects

    # training

    def _on_progress(self, sender: str, event: dealing.Progress) -> list[Effect]:
        if sender not in self._membership.members or self.data is None:
            raise RemoteProtocolError(f"{sender} reports progress and is no member")
        if not self._membership.heeds(sender):
            return []
        completed = self.data.report(sender, event)
        loss = event.loss / event.losses if event.losses else None
        counts = (event.pushed, event.fetched, len(event.dropped))
        effects: list[Effect] = [
            WriteRecord(records.Stepped(sender, event.steps, event.samples, event.pushes, loss, *counts, event.losses))
        ]
        for _ in range(completed):
            effects += self._epoch_done(self.data)
        if not self._may(May.DEAL):
            return effects
        if self.data.finished:
            return effects + self._finish(Cause.EPOCHS_DONE, "all epochs are done")
        armed, due = self._saving.in_time(self.data)
        return [*effects, *self._deal(), *self._write(), *armed, *(self._save() if due else [])]

    def _deal(self) -> list[Effect]:
        return (
            self.data.deal(self._membership.members, withheld=self._saving.holds and self.settings.strategy.one_moment)
            if self.data
            else []
        )

    def _epoch_done(self, data: DataDealer) -> list[Effect]:
        data.epochs += 1
        effects: list[Effect] = [WriteRecord(records.EpochDone(data.epochs))]
        if data.finished:
            return effects
        if is_due(self.settings.evaluate_every, data.epochs):
            effects += self._evaluations.measure(data.epochs)
        if self._may(May.DEAL) and is_due(self.settings.checkpoint_every, data.epochs):
            effects += self._save()
        return effects

    def _on_evaluated(self, sender: str, event: evaluating.Evaluated) -> list[Effect]:
        self._evaluations.measuring = False
        effects: list[Effect] = [WriteRecord(records.Tested(event.number, event.loss, event.accuracy))]
        if self._may(May.DEAL) and (reached := target_reached(self.settings, event.accuracy)):
            return effects + self._finish(Cause.TARGET_REACHED, reached)
        if self._evaluations.owed:
            effects += self._evaluations.measure(self.epochs)
        return effects + self._close()

    # checkpoints

    def _save(self) -> list[Effect]:
        """Begin a checkpoint, unless one is being made or a shard is away."""
        if self._saving.busy or not self._shards.ready or self.data is None:
            return []
        return [
            *self._saving.begin(self.data, self._membership.members),
            *(self._deal() if self._may(May.DEAL) else []),
            *self._write(),
        ]

    def _on_woke(self, sender: str, event: events.Woke) -> list[Effect]:
        self._shards.woke(event.timer)
        due = self._saving.woke(event.timer) and self.data is not None and self.data.pushes and self._may(May.DEAL)
        return (self._greet() if self._may(May.WELCOME) else []) + (self._save() if due else self._write())

    def _write(self) -> list[Effect]:
        """Have the shards write, once nothing is on its way to them."""
        return self._saving.write(self.data, self._membership.members, self._holders) if self.data else []

    def _on_snapshot(self, sender: str, event: checkpointing.SnapshotDone) -> list[Effect]:
        return (self._release() if (effects := self._saving.written(sender, event, self.plan)) else []) + effects

    def _release(self) -> list[Effect]:
        """Let those go on whom a checkpoint has held up."""
        if self.settings.strategy.one_moment:
            return self._deal() if self._may(May.DEAL) else []
        return [Send(role, checkpointing.Go()) for role in sorted(self._membership.members)]

    def _on_saved(self, sender: str, event: events.Saved) -> list[Effect]:
        return self._saving.sealed(event) + self._continue()

    # the end

    def _finish(self, cause: Cause, reason: str) -> list[Effect]:
        """Let the replicas push what they have accrued and leave; then close."""
        self._enter(Phase.LEAVING)
        self._evaluations.owed = False  # the last step measures
        self._closing.begin(cause, reason)
        asked: list[Effect] = [Send(role, membership.Finish(reason)) for role in sorted(self._membership.members)]
        given_up = self._give_up(reason) if self._saving.stage is CheckpointStage.HOLDING else []
        return [WriteRecord(records.Ending.of(cause, reason)), *given_up, *asked, *self._close()]

    def _give_up(self, why: str) -> list[Effect]:
        """Make nothing of a checkpoint that is being made."""
        holds = self._saving.holds
        return self._saving.abandon(why) + (self._release() if holds else [])

    def _on_stop(self, sender: str, event: membership.Stop) -> list[Effect]:
        if self._may(May.DISMISS):
            return self._closing.interrupt(event.reason)
        return (self._finish if self._may(May.DEAL) else self._end)(Cause.INTERRUPTED, event.reason)

    def _close(self) -> list[Effect]:
        """Take the next closing step, once the replicas are gone and the last step is answered."""
        if self._may(May.AWAIT) and not self._busy:
            self._enter(Phase.CLOSING)
            if not (self._shards.ready or self._shards.inherited):
                role = self._shards.unready[0]
                return self._end(
                    Cause.SHARD_DESERTED, self._saving.unsaved(f"{role} is gone, and so are the replicas"), role
                )
        effects: list[Effect] = []
        while (
            self._may(May.CLOSE)
            and self._shards.ready
            and not (self._evaluations.pending or self._saving.busy or self._closing.describing)
        ):
            step = self._closing.steps.pop(0)
            if step is ClosingStep.MEASURE and self.settings.evaluate_every:
                effects += self._evaluations.measure(self.epochs)
            elif step is ClosingStep.SAVE:
                effects += self._save()
            elif step is ClosingStep.DESCRIBE:
                effects += self._closing.describe(self._holders)
            elif step is ClosingStep.STOP:
                return effects + self._end(
                    *records.ended(self._closing.cause, self._closing.reason, self._saving.error)
                )
        return effects

    def _on_description(self, sender: str, event: checkpointing.Description) -> list[Effect]:
        self._closing.describing.discard(sender)
        return [
            WriteRecord(records.Applied(sender, event.version.updates, event.samples, event.staleness)),
            *self._close(),
        ]

    def _end(self, cause: Cause, reason: str, role: str = "") -> list[Effect]:
        everybody = [
            *self._shards.roles,
            *self._standbys.present,
            *self._membership.everybody,
            *self._evaluations.watchers,
        ]
        stops: list[Effect] = [Send(role, membership.Stop(reason)) for role in everybody]
        return [WriteRecord(records.Finished.of(cause, reason, role)), *stops, End(reason)]

    def _on_leave(self, sender: str, event: membership.Leave) -> list[Effect]:
        if (
            not self._membership.heeds(sender) and not event.for_good
        ):  # all have gone back, and it does not know that there is work again
            self._membership.stray(sender)
            return self._greet()
        return [
            Send(sender, membership.Farewell()),
            *self._without(sender, "it goes early" if event.for_good else "it was done", -1, died=False),
        ]

    # death

    def _on_lost(self, sender: str, event: events.Lost) -> list[Effect]:
        if roles.is_replica(sender) or sender == roles.EVALUATOR:
            return self._without(sender, event.reason, event.incarnation, died=True)
        if roles.kind(sender) is roles.Kind.STANDBY:
            return self._standbys.lost(sender, event.incarnation, event.reason)
        return self._without_shard(sender, event) if roles.kind(sender) is roles.Kind.SHARD else []

    def _without_shard(self, role: str, event: events.Lost) -> list[Effect]:
        """Wait for its next life: its standby, or one that goes on from the newest checkpoint; or end, where neither is
        to be had.
        """
        if not self._membership.lives.end(role, event.incarnation, died=True) or not self._shards.gone(
            role, life := self._membership.lives.last(role)
        ):
            return []
        begun, what = self._may(May.REPLACE), f"{role} is gone ({event.reason})"
        if self._standbys.can_succeed(role):
            if self._may(May.CLOSE) and self._saving.holds:
                self._closing.steps.insert(0, ClosingStep.SAVE)
            return [
                WriteRecord(records.Note(f"{what}; its standby takes its place")),
                *self._give_up(what),
                *self._standbys.succeed(role),
            ]
        self._standbys.alone(role)
        cause = (
            Cause.SHARD_SPENT
            if role in self._membership.lives.over
            else Cause.SHARD_CLOSING
            if self._may(May.CLOSE)
            else None
        )
        if cause or (begun and not self._saving.newest):
            return self._end(cause or Cause.SHARD_UNSAVED, self._saving.unsaved(what), role)
        effects, whose = self._give_up(what), f"checkpoint {self._saving.kept}"
        if begun and self.settings.strategy.one_moment:
            return [
                WriteRecord(records.Note(f"{what}; all go back to {whose}")),
                *effects,
                *self._rewind(),
                *self._shards.fall(),
            ]
        told = WriteRecord(
            records.Note(f"{what}; another takes its place{f' and goes on from {whose}' if begun else ''}")
        )
        return [told, *effects, self._shards.grant(role, life + 1)]

    def _rewind(self) -> list[Effect]:
        """Take the whole job back to the newest checkpoint: every shard loads it, and every replica begins anew."""
        assert self.plan is not None
        self._membership.go_back()
        self._standbys.alone(*self._shards.roles)
        self.data = self._dealing(self.plan)
        again, told = self._closing.go_back() if self._may(May.AWAIT) else (False, [])
        if again:
            self._enter(Phase.TRAINING)
        return [WriteRecord(records.Rewound(self.data.samples, self.epochs)), *told]

    def _without(self, role: str, reason: str, incarnation: int, died: bool) -> list[Effect]:
        """Go on without a replica or the evaluator."""
        if not self._membership.part(role, incarnation, died):
            return []
        if role != roles.EVALUATOR:
            return self._without_replica(role, reason, died)
        then = self._evaluations.gone(for_good=role in self._membership.lives.over)
        return [WriteRecord(records.Note(f"the evaluator is gone ({reason}); {then}")), *self._close()]

    def _without_replica(self, role: str, reason: str, died: bool) -> list[Effect]:
        """What it held is dealt again; the job ends where all are gone and none will come back."""
        member = role in self._membership.members
        self._membership.members.discard(role)
        self._saving.held(role)
        left = self.data.lost(role) if member and self.data else 0
        lost = left if died or self._may(May.DEAL) else 0
        effects: list[Effect] = [WriteRecord(records.Gone(role, lost, reason, died))]
        if not self._may(May.GATHER) and self.plan is not None:
            effects += self._shards.tell_gone(self.plan, {role: self._membership.lives.gone[role]})
        if self._membership.deserted(self.settings.replicas) and not self._may(May.DISMISS):
            end = f"every replica is gone; the last was {role}: {reason}"
            cause = Cause.REPLICAS_DIED if died else Cause.REPLICAS_LEFT
            return effects + (self._finish(cause, end) if self._may(May.DEAL) else self._end(cause, end))
        return effects + self._continue()
