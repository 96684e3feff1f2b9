"""Coordinator: the state machine that knows a job's members, deals work, and calls for evaluations, checkpoints and the
end.

It never sees the parameter vector. A job goes through the phases of `PHASES`. A strategy supplies two of the
coordinator's parts: the holders of the parameters, and how work is dealt and counted. The others are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from distbelief.coordination import admission
from distbelief.coordination.cadence import Target, budget_spent, is_due
from distbelief.coordination.closing import Closing, ClosingStep
from distbelief.coordination.dealing import DataDealer
from distbelief.coordination.evaluations import Evaluations
from distbelief.coordination.membership import Membership
from distbelief.coordination.registry import Registry
from distbelief.coordination.saving import Saving
from distbelief.coordination.shards import Shards
from distbelief.coordination.standbys import Standbys
from distbelief.core import events, records, roles
from distbelief.core.conversations import checkpointing, evaluating, membership, partitioning
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.phases import ALLOWED, PHASES, May, Phase
from distbelief.core.conversations.table import Conversation
from distbelief.core.effects import Effect, End, Payload, Send, Wake, WriteRecord
from distbelief.core.events import BudgetSpent, Event, GuestsOver, ScriptOver
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import SERVED, heard_by
from distbelief.core.records import Cause, Outcome
from distbelief.core.roles import Kind
from distbelief.core.settings import Holder, Plan, Settings
from distbelief.errors import LayoutError, RemoteProtocolError, UsageError
from distbelief.server.machine import Answers, Handlers

GUEST_SECONDS = 60.0
"""Longest wait for guests at the end of a job: no supervisor of this job can end them."""


class Holders(Protocol):
    """Part of a coordinator for the roles that hold the parameters: how they get them, and what a death changes."""

    def handlers(self, job: Coordinator) -> Handlers:
        """Return the answers to events of the holders."""

    def roles(self, job: Coordinator) -> list[str]:
        """Return the roles that save the parameters and account for them; none if all such roles are gone."""

    def restore(self, job: Coordinator) -> list[Effect]:
        """Give the initial state, as far as it is known, to the holders that have joined."""

    def initialise(self, job: Coordinator) -> list[Effect]:
        """Have a replica send the initial parameters, once the job waits for them and a replica has joined."""

    def ready(self, job: Coordinator) -> bool:
        """Return whether the holders have all parameters, and can save and account for them."""
        return job.shards.ready

    def welcome(self, job: Coordinator) -> list[Effect]:
        """Welcome the waiting roles, once that is possible."""
        callers = job.membership.callers() if job.shards.sure else ()
        return [effect for role in callers for effect in job.welcome(role)]

    def waits(self, job: Coordinator) -> list[str]:
        """Return a phrase for each role that the holders wait for."""
        return job.shards.waits()

    def without(self, job: Coordinator, replica: str, reason: str) -> list[Effect]:
        """Continue without a replica that the holders were waiting for."""
        return []

    def lost(self, job: Coordinator, role: str, event: events.Lost) -> list[Effect]:
        """Continue without a role that is not a replica."""
        return []


class DealtWork(Protocol):
    """Part of a coordinator for the work: how it is dealt, and what reports count."""

    def handlers(self, job: Coordinator) -> Handlers:
        """Return the answers to reports of work that was dealt."""

    def begin(self, job: Coordinator) -> DataDealer:
        """Make the dealer of the plan's data, at the newest checkpoint."""

    def deal(self, job: Coordinator) -> list[Effect]:
        """Deal work to replicas with room for it."""

    def defers(self) -> bool:
        """Return whether a checkpoint must wait."""
        return False

    def again(self, shard: str) -> list[Effect]:
        """Repeat to a restarted shard the work that its previous incarnation may not have done."""
        return []

    def end(self, job: Coordinator) -> list[Effect]:
        """Break off the work under way, since nothing more is dealt."""
        return []


# Two rules of this machine:
# 1. The phase says which acts are allowed (`ALLOWED`), and each act checks it. So a late event, such as a report while
# the job closes, does only what the phase still allows. 2. Each answer ends with `go_on`, `deal`, `write` or `close`.
# These look at the whole state and do the next thing, if any. So the order of events from different links does not
# matter, and an extra call does no harm.
class Coordinator:
    """Coordinator of a job.

    Args:
        evaluator: whether an evaluator takes part.
        start: where the job continues.
        conversations: those that it takes part in.
    """

    def __init__(
        self,
        settings: Settings,
        evaluator: bool,
        start: StartingPoint,
        holders: Holders,
        work: DealtWork,
        conversations: Iterable[Conversation] = SERVED,
    ) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.plan: Plan | None = None
        self.data: DataDealer | None = None
        self.brought: dict[str, int] = {}
        """Size of each replica's training set."""
        self.holders, self.work = holders, work
        self.evaluations = Evaluations(evaluator)
        # a resumed job may have another cadence
        self.evaluations.unmeasured = start.position.unmeasured % (settings.evaluations.minibatches or 1)
        self.target = Target()
        self._timed = False
        """True once the timer of a budget is set."""
        self.saving = Saving(settings, start)
        self.registry = registry = Registry(settings.restarts)
        self.shards = Shards(settings.shards if settings.strategy.held_by is Holder.SHARDS else 0, registry)
        self.membership = Membership(registry)
        self.standbys = Standbys(settings, self.shards, registry)
        self.closing = Closing()
        answers: Handlers = {
            partitioning.PartitionHere: lambda sender, event: registry.meet(sender, event.place, settings.partitions),
            membership.Join: self.join,
            membership.Rejoin: self._on_rejoin,
            membership.Anew: lambda sender, event: self.membership.begun(sender, event.generation),
            membership.Leave: self._on_leave,
            membership.Stop: self._on_stop,
            checkpointing.Held: lambda sender, event: self.saving.held(sender, event.number) or self.write(),
            checkpointing.SnapshotDone: self._on_snapshot,
            checkpointing.ScriptSaved: self._on_script,
            membership.AskReached: self._on_ask,
            checkpointing.Description: self._on_description,
            evaluating.Evaluated: self._on_evaluated,
            events.Saved: self._on_saved,
            events.Woke: self._on_woke,
            events.Lost: self.lose,
            **holders.handlers(self),
            **work.handlers(self),
        }
        self._answers = Answers("the coordinator", heard_by(Kind.COORDINATOR, conversations), answers)

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        return self._answers.to(sender, type(event))(sender, event)

    def validate(self) -> None:
        self.membership.validate()
        self.shards.validate()
        if self.data is not None:
            self.data.validate(self.membership.members)
        assert self.data is not None or not self.may(May.DEAL), f"{self.phase}, and there is nothing to deal"

    def waits(self) -> str:
        unready = self.holders.waits(self)
        who = unready or sorted(self.closing.describing)
        if not unready and self.may(May.REPLACE) and self.data is not None:
            who = self.data.waiting(self.membership.members) or sorted(self.membership.members, key=roles.index_of)
        who = [roles.EVALUATOR] if self.may(May.DEAL) and not self.evaluations.tried else who
        who = who or [self.evaluations.measuring or roles.EVALUATOR] * self.evaluations.pending
        return f"{self.phase}: {PHASES.meaning[self.phase]}" + (f" ({', '.join(who)})" if who else "")

    def standing(self) -> dict[str, object]:
        return {
            "phase": self.phase,
            "of": {role: {"minibatches": self.data.held(role)} for role in self.membership.members if self.data},
        }

    @property
    def all_hold(self) -> bool:
        """Return whether replicas hold the parameters, and therefore stay until the job ends."""
        return self.settings.strategy.held_by is Holder.REPLICAS

    @property
    def epochs(self) -> int:
        """Epochs that are done."""
        return self.data.epochs if self.data else 0

    def may(self, act: May) -> bool:
        """Return whether the phase allows an action."""
        return act in ALLOWED[self.phase]

    def enter(self, phase: Phase) -> None:
        """Enter another phase."""
        self.phase = PHASES.move(self.phase, phase)

    def go_on(self) -> list[Effect]:
        """Do the next thing, now that something has changed."""
        if self.may(May.INITIALISE):
            return self.holders.initialise(self)
        return [*self.deal(), *self.write()] if self.may(May.DEAL) else self.close()

    # joining

    def join(self, sender: str, event: membership.Join) -> list[Effect]:
        """Let a role take part, or refuse it with the reason."""
        self.registry.begin(sender, event.incarnation)
        if sender == roles.EVALUATOR:
            self.evaluations.comes()
            self.membership.wait(sender)
            return self.greet() if self.may(May.WELCOME) else []
        try:
            plan = self.plan or admission.plan(self.settings, event)
            admission.check(plan, sender, event)
            self.saving.joins(sender, event.keeps)
            if self.data is not None:
                self.data.joins(sender, event.samples)
            self.brought[sender] = event.samples
            if self.plan is None:  # only now: the replica after a refused first one may have another model
                self.plan, self.settings = plan, plan.settings
                self.data = self.work.begin(self)
                self.membership.wait(sender)
                return self.holders.restore(self)
        except (LayoutError, UsageError) as error:
            return [Send(sender, membership.Refused(str(error), isinstance(error, LayoutError)))]
        if self.may(May.DISMISS):
            return [Send(sender, membership.Finish("the job is ending"))]
        self.membership.wait(sender)
        return self.greet() if self.may(May.DEAL) else self.holders.initialise(self)

    def _on_ask(self, sender: str, event: membership.AskReached) -> list[Effect]:
        saving = self.saving
        position = saving.position if self.data is None else self.data.position()
        return [Send(sender, membership.JobReached(position.earliest(sender), saving.newest, saving.resumed))]

    def _on_rejoin(self, sender: str, event: membership.Rejoin) -> list[Effect]:
        if sender not in self.membership.members and (sender != self.evaluations.who):
            raise RemoteProtocolError(f"{sender} comes back but is no member")
        self.membership.stray(sender)
        begun = not self.may(May.INITIALISE)
        return self.shards.doubt(event.lost) + (self.greet() if begun else self.holders.initialise(self))

    def greet(self) -> list[Effect]:
        """Welcome the roles that wait, once the holders are ready, and deal them work."""
        return [*self.holders.welcome(self), *self.deal()]

    def welcome(self, role: str, initialise: bool = False) -> list[Effect]:
        """Have a role take part; with `initialise`, it sends the initial parameters."""
        assert self.plan is not None
        effects: list[Effect] = [
            Send(role, membership.Welcome(self.plan, initialise, self.shards.places, self.membership.generation(role)))
        ]
        if role == roles.EVALUATOR:
            return effects + (self.evaluations.joined(self.epochs) if not self.evaluations.who else [])
        if self.saving.holds and not self.settings.strategy.one_moment:
            effects.append(self.saving.hold(role))
        if self.may(May.DISMISS):
            effects.append(Send(role, membership.Finish(self.closing.reason)))
        if self.membership.admit(role):
            effects.append(WriteRecord(records.Joined(role)))
        return effects

    # training

    def begin(self) -> list[Effect]:
        """Begin to train, now that the shards have the parameters."""
        assert self.plan is not None
        assert self.data is not None
        self.enter(Phase.TRAINING)
        self._timed = False
        effects: list[Effect] = [
            WriteRecord(admission.started(self.plan, self.data.samples, self.epochs)),
            *self.holders.welcome(self),
            *self.standbys.pair(self.plan),
        ]
        if self.data.finished:
            return effects + self.finish(Cause.DONE_BEFORE, "every epoch was done before")
        if any(self.settings.snapshots) and not (self.saving.newest or self.all_hold):
            effects += self.save()  # a shard that dies goes back to this one
        return effects + self.deal()

    def deal(self) -> list[Effect]:
        """Deal work to replicas with room, once an evaluator has tried to measure the model."""
        if not self.may(May.DEAL) or not self.evaluations.tried:
            return []
        seconds = 0.0 if self._timed else self.settings.budget_seconds  # not before: an evaluator may be late
        self._timed = True
        return [*([Wake(seconds, BudgetSpent())] if seconds else []), *self.work.deal(self)]

    def until_due(self, data: DataDealer, every: int) -> float:
        """Return the number of minibatches until an evaluation or a checkpoint is due; `every` of them make a push."""
        evaluations, snapshots = self.settings.evaluations, self.settings.snapshots
        cadences = (
            (evaluations.minibatches, self.evaluations.unmeasured),
            (snapshots.minibatches, data.minibatches),
            (snapshots.pushes * every, data.pushes * every),
        )
        return min((whole - done for whole, done in cadences if whole), default=math.inf)

    def applied(self, data: DataDealer, epochs: int, minibatches: int = 0) -> list[Effect]:
        """Do the next thing after these epochs and minibatches were applied."""
        # counted first, since a checkpoint at an epoch's end includes these minibatches
        due = self.evaluations.due(minibatches, self.settings.evaluations.minibatches)
        effects = [effect for _ in range(epochs) for effect in self.epoch_done(data)]
        if not self.may(May.DEAL):
            return effects
        if due and not data.finished:
            effects += self.evaluations.measure(self.epochs)
        if data.finished:
            return effects + self.finish(Cause.EPOCHS_DONE, "all epochs are done")
        armed, due = self.saving.in_time(data)
        return [*effects, *self.deal(), *self.write(), *armed, *(self.save() if due else [])]

    def epoch_done(self, data: DataDealer) -> list[Effect]:
        """Note the end of an epoch; measure and save, if due."""
        data.epochs += 1
        effects: list[Effect] = [WriteRecord(records.EpochDone(data.epochs))]
        if data.finished:
            return effects
        if is_due(self.settings.evaluations.epochs, data.epochs):
            effects += self.evaluations.measure(data.epochs)
        if self.may(May.DEAL) and is_due(self.settings.checkpoint_every, data.epochs):
            effects += self.save()
        return effects

    def _on_evaluated(self, sender: str, event: evaluating.Evaluated) -> list[Effect]:
        if self.evaluations.measuring != sender:
            return []  # meanwhile another role has been asked
        self.evaluations.measuring = ""
        tested = records.Tested(event.number, event.loss, event.accuracy, event.metrics, event.seconds)
        effects: list[Effect] = [WriteRecord(tested)]
        reached = self.target.reached(self.settings, tested)
        if reached and self.may(May.DEAL):
            return effects + self.finish(Cause.TARGET_REACHED, reached)
        if self.evaluations.owed:
            effects += self.evaluations.measure(self.epochs)
        return effects + self.go_on()

    # checkpoints

    def return_to_checkpoint(self) -> DataDealer:
        """Return data, target and count of unmeasured minibatches to their state at the newest checkpoint."""
        self.data = self.work.begin(self)
        self.target.forget()
        self.evaluations.unmeasured = self.saving.position.unmeasured
        return self.data

    def save(self) -> list[Effect]:
        """Begin a checkpoint, unless one is under way or roles that must save are away."""
        if self.may(May.DEAL) and self.work.defers():
            return []
        if not self.holders.roles(self):
            if self.may(May.CLOSE) and self.closing.cause.outcome is not Outcome.FAILED:
                self.closing.cause, self.closing.reason = Cause.UNKEPT, self.saving.unsaved("every replica is gone")
            return []
        if self.saving.busy or not self.holders.ready(self) or self.data is None:
            return []
        return [*self.saving.begin(self.data, self.membership.members), *self.deal(), *self.write()]

    def _on_woke(self, sender: str, event: events.Woke) -> list[Effect]:
        if isinstance(event.timer, BudgetSpent):
            return self.finish(Cause.BUDGET_SPENT, budget_spent(self.settings)) if self.may(May.DEAL) else []
        if isinstance(event.timer, GuestsOver):
            return self._without_guests() if self.may(May.AWAIT) else []
        if isinstance(event.timer, ScriptOver):
            return self.saving.script_late(event.timer, self.plan)
        self.shards.woke(event.timer)
        due = self.saving.woke(event.timer) and self.data is not None and self.data.pushes and self.may(May.DEAL)
        return (self.greet() if self.may(May.WELCOME) else []) + (self.save() if due else self.write())

    def write(self) -> list[Effect]:
        """Have the holders write the parameters, once no push is on its way."""
        if self.data is None or self.saving.stage is not CheckpointStage.HOLDING:
            return []
        if not self.holders.ready(self):
            return []  # while a group forms, the rounds that its members have made are unknown
        return self.saving.write(
            self.data, self.evaluations.unmeasured, self.membership.members, self.holders.roles(self)
        )

    def _on_snapshot(self, sender: str, event: checkpointing.SnapshotDone) -> list[Effect]:
        return (self.release() if (effects := self.saving.written(sender, event, self.plan)) else []) + effects

    def _on_script(self, sender: str, event: checkpointing.ScriptSaved) -> list[Effect]:
        return self.saving.script_saved(sender, event, self.plan, ends=not self.may(May.DEAL))

    def release(self) -> list[Effect]:
        """Let replicas continue that a checkpoint has held up."""
        if self.settings.strategy.one_moment:
            return self.deal()
        return [Send(role, checkpointing.Go()) for role in sorted(self.membership.members)]

    def _on_saved(self, sender: str, event: events.Saved) -> list[Effect]:
        effects = self.saving.sealed(event) + self.go_on()
        if self.saving.again and self.may(May.DEAL) and self.holders.roles(self):
            self.saving.again = False
            effects += self.save()
        return effects

    # the end

    def finish(self, cause: Cause, reason: str) -> list[Effect]:
        """Have the replicas push their accrued gradients and leave; then close."""
        self.enter(Phase.LEAVING)
        self.evaluations.owed = False  # the last closing step measures
        self.closing.begin(cause, reason)
        requests: list[Effect] = [Send(role, membership.Finish(reason)) for role in sorted(self.membership.members)]
        given_up = self.give_up(reason) if self.saving.stage is CheckpointStage.HOLDING else []
        if self._guests():
            requests.append(Wake(GUEST_SECONDS, GuestsOver()))
        return [
            *self.work.end(self),
            *([] if self.all_hold else self._ends()),
            *given_up,
            *requests,
            *self.close(),
        ]

    def _ends(self) -> list[Effect]:
        """Record that roles which leave or die from now on are not restarted."""
        left = sorted(self.membership.members) if self.all_hold else ()
        gone = [WriteRecord(records.Gone(role, 0, "it was done", died=False)) for role in left]
        return [WriteRecord(records.Ending.of(self.closing.cause, self.closing.reason)), *gone]

    def _guests(self) -> list[str]:
        """Return the busy members that the job did not start itself."""
        return sorted(self.membership.busy - {*roles.leads(self.settings.mesh)})

    def _without_guests(self) -> list[Effect]:
        """End the job without guests that do not leave, such as a script that hangs."""
        return self.send_away(self._guests(), f"it has not left within {GUEST_SECONDS:g} s of the end")

    def send_away(self, guests: Iterable[str], why: str) -> list[Effect]:
        """Go on without guests, and tell them why."""
        effects: list[Effect] = []
        for role in guests:
            effects += [Send(role, membership.Refused(why)), *self.without(role, why, -1, died=False)]
        return effects

    def give_up(self, why: str) -> list[Effect]:
        """Give up the checkpoint under way, if any."""
        holds = self.saving.holds
        return self.saving.abandon(why) + (self.release() if holds else [])

    def _on_stop(self, sender: str, event: membership.Stop) -> list[Effect]:
        if self.may(May.DISMISS):
            return self.closing.interrupt(event.reason)
        # while all go back and shards restart, the newest checkpoint has everything: end at once
        holds = self.shards.ready or self.shards.kept
        return (self.finish if self.may(May.DEAL) and holds else self.end)(Cause.INTERRUPTED, event.reason)

    def close(self) -> list[Effect]:
        """Take the next closing step, once the replicas are gone and the last step is answered."""
        if self.may(May.AWAIT) and not self.membership.busy:
            self.enter(Phase.CLOSING)
            if not (self.shards.ready or self.shards.kept):
                role = self.shards.unready[0]
                return self.end(
                    Cause.SHARD_DESERTED, self.saving.unsaved(f"{role} is gone, and so are the replicas"), role
                )
        effects: list[Effect] = []
        # Each step begins once the one before is answered, so that the evaluation, the last checkpoint and the accounts
        # are of one model. While a shard is away they wait for its next incarnation.
        measures = self.evaluations.pending and self.closing.cause is not Cause.INTERRUPTED
        while (
            self.may(May.CLOSE)
            and self.closing.steps
            and self.holders.ready(self)
            and not (measures or self.saving.busy or self.closing.describing)
        ):
            step = self.closing.steps.pop(0)
            if step is ClosingStep.MEASURE and self.settings.evaluates:
                effects += self.evaluations.measure(self.epochs)
                measures = self.evaluations.pending
            elif step is ClosingStep.SAVE:
                effects += self.save()
            elif step is ClosingStep.DESCRIBE:
                effects += self.closing.describe(self.holders.roles(self))
            elif step is ClosingStep.STOP:
                ended = records.ended(self.closing.cause, self.closing.reason, self.saving.error)
                return effects + (self._ends() if self.all_hold else []) + self.end(*ended)
        return effects

    def _on_description(self, sender: str, event: checkpointing.Description) -> list[Effect]:
        self.closing.describing.discard(sender)
        return [
            WriteRecord(records.Applied(sender, event.version.updates, event.samples, event.staleness)),
            *self.close(),
        ]

    def end(self, cause: Cause, reason: str, role: str = "") -> list[Effect]:
        """End the job at once; `role` is the one that caused it, if any."""
        self.closing.steps = []
        everybody = [
            *self.shards.roles,
            *self.standbys.present,
            *self.membership.everybody,
            *self.evaluations.watchers,
        ]
        stops: list[Effect] = [Send(role, membership.Stop(reason)) for role in everybody]
        return [WriteRecord(records.Finished.of(cause, reason, role)), *stops, End(reason)]

    # roles that leave or die

    def _on_leave(self, sender: str, event: membership.Leave) -> list[Effect]:
        if not self.membership.heeds(sender) and not event.for_good:
            self.membership.stray(sender)  # this replica does not know yet that all have gone back, and have more work
            return self.greet()
        stopped, why = list[Effect](), "it goes early" if event.for_good else "it was done"
        member, members = sender in self.membership.members, self.membership.members
        if member and self.may(May.DEAL) and event.stops:
            stopped = self.finish(Cause.SCRIPT_STOPPED, f"the script of {sender} has stopped the job")
        elif member and self.may(May.DEAL) and self.all_hold and len(members) == 1:
            stopped = self.finish(Cause.REPLICAS_LEFT, f"every replica is gone; the last was {sender}: {why}")
        spared = self.all_hold and event.for_good and len(members) > 1  # the other replicas hold the same parameters
        if member and self.all_hold and self.may(May.DISMISS) and not spared:
            self.membership.done.add(sender)
            return [*stopped, *self.close()]
        requests = self.saving.ask_who_leaves(sender, members, ends=not self.may(May.DEAL))
        if requests:  # the replica sends another Leave once it has saved its script's state
            return stopped + requests
        return [*stopped, Send(sender, membership.Farewell()), *self.without(sender, why, -1, died=False)]

    def lose(self, sender: str, event: events.Lost) -> list[Effect]:
        """Continue without a role that is gone."""
        if roles.is_replica(sender) or sender == roles.EVALUATOR:
            return self.without(roles.lead_of(sender), event.reason, event.incarnation, died=True)
        return self.holders.lost(self, sender, event)

    def without(self, role: str, reason: str, incarnation: int, died: bool) -> list[Effect]:
        """Continue without an incarnation of a replica, or of the evaluator."""
        if not self.membership.part(role, incarnation, died):
            return []
        if role != roles.EVALUATOR:
            return self._without_replica(role, reason, died)
        then = self.evaluations.gone(for_good=role in self.registry.over)
        return [WriteRecord(records.Note(f"the evaluator is gone ({reason}); {then}")), *self.deal(), *self.close()]

    def _without_replica(self, role: str, reason: str, died: bool) -> list[Effect]:
        """Deal a replica's minibatches again; end the job if all replicas are gone and none will come back."""
        member = role in self.membership.members
        self.membership.members.discard(role)
        effects = self.saving.gone(role, self.plan)
        # minibatches of a replica that leaves after the end of dealing are not lost: no replica needs them any more
        left = self.data.lost(role) if member and self.data else 0
        lost = left if died or self.may(May.DEAL) else 0
        leads = roles.leads(self.settings.mesh)
        # a guest's own machine decides whether to restart it, and may be gone too: the job does not wait for it
        over = role in self.registry.over or role not in leads
        given_up = self.data.give_up(role) if over and self.data and not self.may(May.DISMISS) else 0
        effects.append(WriteRecord(records.Gone(role, 0 if given_up else lost, reason, died, given_up)))
        effects += self.holders.without(self, role, reason)
        if not self.may(May.GATHER) and self.plan is not None:
            effects += self.shards.tell_gone(self.plan, {role: self.registry.gone[role]})
        if self.membership.deserted(leads) and not self.may(May.DISMISS):
            end = f"every replica is gone; the last was {role}: {reason}"
            cause = Cause.REPLICAS_DIED if died else Cause.REPLICAS_LEFT
            return effects + (self.finish(cause, end) if self.may(May.DEAL) else self.end(cause, end))
        return effects + self.go_on()
