"""The coordinator: the machine that knows the members, has work dealt, and calls for measures, checkpoints, the end.

It never sees the parameter vector. A job goes through the phases of `PHASES`. What every job has in common is made of
the parts below; who holds the parameters, and how work is dealt and counted, are two parts that a strategy gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from distbelief.coordination import admission
from distbelief.coordination.cadence import Target, budget_spent, budget_timer, is_due
from distbelief.coordination.closing import Closing, ClosingStep
from distbelief.coordination.dealing import DataDealer
from distbelief.coordination.evaluations import Evaluations
from distbelief.coordination.membership import Membership
from distbelief.coordination.registry import Registry
from distbelief.coordination.saving import Saving
from distbelief.coordination.shards import Shards
from distbelief.coordination.standbys import Standbys
from distbelief.core import events, records, roles
from distbelief.core.conversations import checkpointing, evaluating, membership, partitioning, scripting
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.phases import ALLOWED, PHASES, May, Phase
from distbelief.core.conversations.table import Conversation
from distbelief.core.effects import Effect, End, Send, WriteRecord
from distbelief.core.outcomes import Cause, Outcome
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import SERVED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Holder, Plan, Settings
from distbelief.core.timers import BudgetSpent, ScriptOver
from distbelief.errors import LayoutError, RemoteProtocolError, UsageError
from distbelief.server.machine import Answering, Answers

Handlers = Mapping[type, Callable[..., list[Effect]]]
"""The answer to each kind of event, from its sender and itself."""


class Holders(Protocol):
    """Part of a coordinator for the holders of the parameters: how they come to hold them, and what a death changes."""

    def handlers(self, job: Coordinator) -> Handlers:
        """Return the answers to the events of those who hold them."""
        ...

    def roles(self, job: Coordinator) -> list[str]:
        """Return the roles that save the parameters and account for them; none where all who could are gone."""
        ...

    def restore(self, job: Coordinator) -> list[Effect]:
        """Have them hold what the job begins with, as far as that is known, and they are there."""
        ...

    def initialise(self, job: Coordinator) -> list[Effect]:
        """Have a replica give the first parameters, once the job waits for that and one is there."""
        ...

    def ready(self, job: Coordinator) -> bool:
        """Return whether they hold what they are to hold, and can be asked to save and account for it."""
        return job.shards.ready

    def welcome(self, job: Coordinator) -> list[Effect]:
        """Have those take part who wait for it, once that can be."""
        callers = job.membership.callers() if job.shards.sure else ()
        return [effect for role in callers for effect in job.welcome(role)]

    def waits(self, job: Coordinator) -> list[str]:
        """Return for whom the job waits before they are ready, in words."""
        return job.shards.waits()

    def without(self, job: Coordinator, replica: str, reason: str) -> list[Effect]:
        """Go on without what a replica was asked to do for them."""
        return []

    def lost(self, job: Coordinator, role: str, event: events.Lost) -> list[Effect]:
        """Go on without one who is no replica."""
        return []


class DealtWork(Protocol):
    """Part of a coordinator for the work: to whom it is dealt, and what reports count for."""

    def handlers(self, job: Coordinator) -> Handlers:
        """Return the answers to reports of work that was dealt."""
        ...

    def begin(self, job: Coordinator) -> DataDealer:
        """Make the dealer of the plan's data, from the newest checkpoint on."""
        ...

    def deal(self, job: Coordinator) -> list[Effect]:
        """Give work to those who have room for it."""
        ...

    def defers(self) -> bool:
        """Return whether a checkpoint cannot be begun now: it is begun as soon as it can."""
        return False

    def again(self, shard: str) -> list[Effect]:
        """Repeat to a shard that has come again, and holds its range, what the life before may not have done."""
        return []

    def end(self, job: Coordinator) -> list[Effect]:
        """Leave off, since nothing more is dealt."""
        return []


# The rules of this machine:
# 1. The phase says what may be done (`ALLOWED`), and each act asks it. So an event that comes late, a report while the
# job closes say, does only what the phase still allows.
# 2. Whatever has changed, the last thing is `go_on`, `deal`, `write` or `close`. Each looks at all that is known and
# does what is next, if anything is. So the order in which the events of several links come does not matter, and to ask
# once too often does no harm.
class Coordinator(Answering):
    """The coordinator of one job.

    Args:
        settings: of the job; every replica is told them.
        evaluator: whether an evaluator takes part.
        start: from where the job goes on.
        holders: of its parameters.
        work: that it deals.
        conversations: in which it takes part.
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
        """Samples of the training set of each replica."""
        self.holders, self.work = holders, work
        self.evaluations = Evaluations(evaluator)
        self.target = Target()
        self._timed = False
        """True while the time of a budget passes."""
        self.saving = Saving(settings, start)
        self.registry = registry = Registry(settings.restarts)
        self.shards = Shards(settings.shards if settings.strategy.held_by is Holder.SHARDS else 0, registry)
        self.membership = Membership(registry)
        self.standbys = Standbys(settings, self.shards, registry)
        self.closing = Closing()
        answers: dict[type, Callable[..., list[Effect]]] = {
            partitioning.PartitionHere: lambda sender, event: registry.meet(sender, event.place, settings.partitions),
            membership.Join: self.join,
            membership.Rejoin: self._on_rejoin,
            membership.Anew: lambda sender, event: self.membership.begun(sender, event.generation),
            membership.Leave: self._on_leave,
            membership.Stop: self._on_stop,
            checkpointing.Held: lambda sender, event: self.saving.held(sender, event.number) or self.write(),
            checkpointing.SnapshotDone: self._on_snapshot,
            checkpointing.ScriptSaved: self._on_script,
            scripting.AskReached: self._on_ask,
            checkpointing.Description: self._on_description,
            evaluating.Evaluated: self._on_evaluated,
            events.Saved: self._on_saved,
            events.Woke: self._on_woke,
            events.Lost: self.lose,
            **holders.handlers(self),
            **work.handlers(self),
        }
        self._answers = Answers("the coordinator", heard_by(Kind.COORDINATOR, conversations), answers)

    def validate(self) -> None:
        """Assert what holds between two events."""
        self.membership.validate()
        self.shards.validate()
        if self.data is not None:
            self.data.validate(self.membership.members)
        assert self.data is not None or not self.may(May.DEAL), f"{self.phase}, and there is nothing to deal"

    def waits(self) -> str:
        """Say in one sentence what the job waits for, for whoever wonders why nothing happens."""
        unready = self.holders.waits(self)
        who = unready or sorted(self.closing.describing)
        if not unready and self.may(May.REPLACE) and self.data is not None:
            who = self.data.waiting(self.membership.members) or sorted(self.membership.members, key=roles.index_of)
        who = [roles.EVALUATOR] if self.may(May.DEAL) and not self.evaluations.tried else who
        who = who or [self.evaluations.measuring or roles.EVALUATOR] * self.evaluations.pending
        return f"{self.phase}: {PHASES.meaning[self.phase]}" + (f" ({', '.join(who)})" if who else "")

    def standing(self) -> dict[str, object]:
        """Return the phase, and the minibatches that each member holds."""
        return {
            "phase": self.phase,
            "of": {role: {"minibatches": self.data.held(role)} for role in self.membership.members if self.data},
        }

    @property
    def all_hold(self) -> bool:
        """True where replicas hold the parameters: who is done stays to the end; if all die before the job is over, all
        go back to a checkpoint, and their next incarnations are awaited.
        """
        return self.settings.strategy.held_by is Holder.REPLICAS

    @property
    def epochs(self) -> int:
        """Number of epochs that are done."""
        return self.data.epochs if self.data else 0

    def may(self, act: May) -> bool:
        """Return whether the phase allows an action."""
        return act in ALLOWED[self.phase]

    def enter(self, phase: Phase) -> None:
        """Go into another phase."""
        self.phase = PHASES.move(self.phase, phase)

    def go_on(self) -> list[Effect]:
        """Do what is next, now that something has changed."""
        if self.may(May.INITIALISE):
            return self.holders.initialise(self)
        return [*self.deal(), *self.write()] if self.may(May.DEAL) else self.close()

    # joining

    def join(self, sender: str, event: membership.Join) -> list[Effect]:
        """Let a role take part, or tell it why it may not."""
        self.registry.begin(sender, event.incarnation)
        if sender == roles.EVALUATOR:
            self.evaluations.comes()
            self.membership.wait(sender)
            return self.greet() if self.may(May.WELCOME) else []
        try:
            if self.plan is None:
                # the plan is kept only once all checks are passed: a first replica that is refused leaves the place to
                # the next
                plan = admission.plan(self.settings, event)
                admission.check(plan, sender, event)
                self.saving.joins(sender, event.keeps)
                self.plan, self.settings, self.brought[sender] = plan, plan.settings, event.samples
                self.data = self.work.begin(self)
                self.membership.wait(sender)
                return self.holders.restore(self)
            admission.check(self.plan, sender, event)
            self.saving.joins(sender, event.keeps)
            if self.data is not None:
                self.data.joins(sender, event.samples)
            self.brought[sender] = event.samples
        except (LayoutError, UsageError) as error:
            return [Send(sender, membership.Refused(str(error), isinstance(error, LayoutError)))]
        if self.may(May.DISMISS):
            return [Send(sender, membership.Finish("the job is ending"))]
        self.membership.wait(sender)
        return self.greet() if self.may(May.DEAL) else self.holders.initialise(self)

    def _on_ask(self, sender: str, event: scripting.AskReached) -> list[Effect]:
        saving = self.saving
        position = saving.position if self.data is None else self.data.position()
        return [Send(sender, scripting.JobReached(position.earliest(sender), saving.newest, saving.resumed))]

    def _on_rejoin(self, sender: str, event: membership.Rejoin) -> list[Effect]:
        if sender not in self.membership.members and (sender != self.evaluations.who):
            raise RemoteProtocolError(f"{sender} comes back, and is no member")
        self.membership.stray(sender)
        begun = not self.may(May.INITIALISE)
        return self.shards.doubt(event.lost) + (self.greet() if begun else self.holders.initialise(self))

    def greet(self) -> list[Effect]:
        """Welcome those who wait for it, once the shards are there, and give them work."""
        return [*self.holders.welcome(self), *self.deal()]

    def welcome(self, role: str, initialise: bool = False) -> list[Effect]:
        """Have one take part, who is to give the first parameters where he is to `initialise`."""
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
        """Train, now that the parameters are there."""
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
            effects += self.save()  # for a shard that dies to go back to
        return effects + self.deal()

    def deal(self) -> list[Effect]:
        """Give work to those with room, once an evaluator has begun: it tries first whether the model is measured."""
        if not self.may(May.DEAL) or not self.evaluations.tried:
            return []
        timer = [] if self._timed else budget_timer(self.settings)  # an evaluator that is late costs none of a budget
        self._timed = True
        return [*timer, *self.work.deal(self)]

    def until_due(self, data: DataDealer, every: int) -> float:
        """Return how many minibatches are to be done before a measure or a checkpoint is due, `every` of them a
        push.
        """
        evaluations, snapshots = self.settings.evaluations, self.settings.snapshots
        cadences = (
            (evaluations.minibatches, self.evaluations.unmeasured),
            (snapshots.minibatches, data.minibatches),
            (snapshots.pushes * every, data.pushes * every),
        )
        return min((whole - done for whole, done in cadences if whole), default=math.inf)

    def applied(self, data: DataDealer, epochs: int, minibatches: int = 0) -> list[Effect]:
        """Do what is next, now that so many more epochs are done, and minibatches applied."""
        # counted first: a checkpoint that an epoch's end begins is of after these minibatches
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
        """One more is done: measure and save, where that is due."""
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
            return []  # another was asked since
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
        """Have data, target and what is due by minibatches stand where they stood at the newest checkpoint."""
        self.data = self.work.begin(self)
        self.target.forget()
        self.evaluations.unmeasured = self.saving.unmeasured
        return self.data

    def save(self) -> list[Effect]:
        """Begin a checkpoint, unless one is being made, or who would make it is away."""
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
        if isinstance(event.timer, ScriptOver):
            return self.saving.script_late(event.timer, self.plan)
        self.shards.woke(event.timer)
        due = self.saving.woke(event.timer) and self.data is not None and self.data.pushes and self.may(May.DEAL)
        return (self.greet() if self.may(May.WELCOME) else []) + (self.save() if due else self.write())

    def write(self) -> list[Effect]:
        """Have those who hold the parameters write them, once nothing is on its way to them."""
        if self.data is None or self.saving.stage is not CheckpointStage.HOLDING:
            return []
        if not self.holders.ready(self):
            return []  # while a group is formed nobody knows which rounds its members have made
        return self.saving.write(
            self.data, self.evaluations.unmeasured, self.membership.members, self.holders.roles(self)
        )

    def _on_snapshot(self, sender: str, event: checkpointing.SnapshotDone) -> list[Effect]:
        return (self.release() if (effects := self.saving.written(sender, event, self.plan)) else []) + effects

    def _on_script(self, sender: str, event: checkpointing.ScriptSaved) -> list[Effect]:
        return self.saving.script_saved(sender, event, self.plan, ends=not self.may(May.DEAL))

    def release(self) -> list[Effect]:
        """Let those go on whom a checkpoint has held up."""
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
        """Let the replicas push what they have accrued and leave; then close."""
        self.enter(Phase.LEAVING)
        self.evaluations.owed = False  # the last step measures
        self.closing.begin(cause, reason)
        requests: list[Effect] = [Send(role, membership.Finish(reason)) for role in sorted(self.membership.members)]
        given_up = self.give_up(reason) if self.saving.stage is CheckpointStage.HOLDING else []
        return [
            *self.work.end(self),
            *([] if self.all_hold else self._ends()),
            *given_up,
            *requests,
            *self.close(),
        ]

    def _ends(self) -> list[Effect]:
        """Tell that who goes from here on does not come again; who stays to the end is done."""
        left = sorted(self.membership.members) if self.all_hold else ()
        gone = [WriteRecord(records.Gone(role, 0, "it was done", died=False)) for role in left]
        return [WriteRecord(records.Ending.of(self.closing.cause, self.closing.reason)), *gone]

    def give_up(self, why: str) -> list[Effect]:
        """Make nothing of a checkpoint that is being made."""
        holds = self.saving.holds
        return self.saving.abandon(why) + (self.release() if holds else [])

    def _on_stop(self, sender: str, event: membership.Stop) -> list[Effect]:
        if self.may(May.DISMISS):
            return self.closing.interrupt(event.reason)
        # where all have gone back, and shards begin anew, the newest checkpoint has all that there is
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
        # Each of the last steps begins when the one before is answered, so that the measure, the last checkpoint and
        # the accounts are all of one model. While a shard is away they wait for its next life.
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
        """End at once, because of a role where it is its doing."""
        self.closing.steps = []
        everybody = [
            *self.shards.roles,
            *self.standbys.present,
            *self.membership.everybody,
            *self.evaluations.watchers,
        ]
        stops: list[Effect] = [Send(role, membership.Stop(reason)) for role in everybody]
        return [WriteRecord(records.Finished.of(cause, reason, role)), *stops, End(reason)]

    # who goes

    def _on_leave(self, sender: str, event: membership.Leave) -> list[Effect]:
        if not self.membership.heeds(sender) and not event.for_good:
            self.membership.stray(sender)  # all have gone back, and it does not know that there is work again
            return self.greet()
        stopped, why = list[Effect](), "it goes early" if event.for_good else "it was done"
        member, members = sender in self.membership.members, self.membership.members
        if member and self.may(May.DEAL) and event.stops:
            stopped = self.finish(Cause.SCRIPT_STOPPED, f"the script of {sender} has stopped the job")
        elif member and self.may(May.DEAL) and self.all_hold and len(members) == 1:
            stopped = self.finish(Cause.REPLICAS_LEFT, f"every replica is gone; the last was {sender}: {why}")
        spared = self.all_hold and event.for_good and len(members) > 1  # others hold what it does
        if member and self.all_hold and self.may(May.DISMISS) and not spared:
            self.membership.done.add(sender)
            return [*stopped, *self.close()]
        requests = self.saving.ask_who_leaves(sender, members, ends=not self.may(May.DEAL))
        if requests:  # who was asked says again that it leaves
            return stopped + requests
        return [*stopped, Send(sender, membership.Farewell()), *self.without(sender, why, -1, died=False)]

    def lose(self, sender: str, event: events.Lost) -> list[Effect]:
        """Go on without a role that is gone."""
        if roles.is_replica(sender) or sender == roles.EVALUATOR:
            return self.without(roles.lead_of(sender), event.reason, event.incarnation, died=True)
        return self.holders.lost(self, sender, event)

    def without(self, role: str, reason: str, incarnation: int, died: bool) -> list[Effect]:
        """Go on without a life of a replica, or of the evaluator."""
        if not self.membership.part(role, incarnation, died):
            return []
        if role != roles.EVALUATOR:
            return self._without_replica(role, reason, died)
        then = self.evaluations.gone(for_good=role in self.registry.over)
        return [WriteRecord(records.Note(f"the evaluator is gone ({reason}); {then}")), *self.deal(), *self.close()]

    def _without_replica(self, role: str, reason: str, died: bool) -> list[Effect]:
        """Deal again what a replica held; end the job where all are gone and none will come back."""
        member = role in self.membership.members
        self.membership.members.discard(role)
        effects = self.saving.gone(role, self.plan)
        # who leaves when the job has ended leaves only what nobody is to do any more: that is not lost
        left = self.data.lost(role) if member and self.data else 0
        lost = left if died or self.may(May.DEAL) else 0
        leads = roles.leads(self.settings.mesh)
        # whether a guest comes again is for its own machine to say, which may be gone too: nobody waits for it
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
