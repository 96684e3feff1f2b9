"""The coordinator without a server: it forms a group of the replicas, deals to all at once, and forms it anew.

A group is formed in three steps: all halt and say how many rounds they have made; one that has made most becomes the
source of what the others lack; all are told who is in it. What is dealt and not done is then dealt again. So every
minibatch is in exactly one update, whoever dies.
"""

from __future__ import annotations

from distbelief.coordination import admission
from distbelief.coordination.cadence import (
    MinibatchCount,
    SnapshotTimer,
    Target,
    budget_spent,
    budget_timer,
    is_due,
    snapshot_due,
)
from distbelief.coordination.coordinator import Handlers
from distbelief.coordination.registry import Registry
from distbelief.core import events, records, roles
from distbelief.core.conversations import evaluating, grouping, membership, partitioning, scripting
from distbelief.core.conversations.grouping import GROUP_ALLOWED, GROUP_PHASES, Duty, GroupMay, GroupPhase
from distbelief.core.effects import Commit, Discard, Effect, End, Send, WriteRecord
from distbelief.core.outcomes import Cause
from distbelief.core.portions import Portion, StartingPoint
from distbelief.core.protocol import GROUPED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan, Settings
from distbelief.core.timers import BudgetSpent
from distbelief.errors import LayoutError, UsageError
from distbelief.server.machine import Answering, Answers
from distbelief.strategies.grouped.grouping import Grouping
from distbelief.strategies.grouped.round_batches import ROUNDS_LIMIT, RoundBatches, Share
from distbelief.strategies.grouped.settings import reduction

AHEAD = 2
"""Round batches that a group has at a time."""
BARREN, BARREN_WITH_GUESTS = 5, 2
"""Groups in a row that may break up without a round or a death; and with guests, whom others may not reach."""


class AllreduceCoordinator(Answering):
    """The coordinator of one job whose replicas reduce among themselves.

    Args:
        settings: of the job; every replica is told them.
        evaluates: whether the model is measured.
        start: from where the first group goes on.
    """

    heard = heard_by(Kind.COORDINATOR, GROUPED)

    def __init__(self, settings: Settings, evaluates: bool, start: StartingPoint) -> None:
        self.settings, self._evaluates = settings, evaluates
        self.plan: Plan | None = None
        self.data: RoundBatches | None = None
        self.samples, self.rounds, self.number = start.samples, 0, start.number
        self.phase = GroupPhase.GATHERING
        self._kept = start
        """The newest checkpoint."""
        self._resumed = bool(start.checkpoint)
        self._cut = start.position
        """Position of the next round's data."""
        self._failed, self._updates = "", 0
        self._registry = registry = Registry(settings.restarts)
        self._groups = Grouping()
        self._told: dict[str, grouping.RoundsMade] = {}
        self._fallen: list[
            tuple[str, str, bool]
        ] = []  # who is gone since the group was formed, of whom is not known yet what was done
        self._barren = 0
        self._duties: list[
            tuple[Duty, int]
        ] = []  # what the first member is to do before more is dealt, the first of which it does now
        self._out = False
        self._pushes = self._minibatches = 0
        """Since the last checkpoint."""
        self._unmeasured = MinibatchCount()
        """Since an evaluation was due."""
        self._unmeasured_kept = 0
        """Those of them at the newest checkpoint."""
        self._timer, self._target = SnapshotTimer(), Target()
        self._cause, self._reason = Cause.EPOCHS_DONE, ""
        self._interrupted = (
            ""  # why it was to end when it was ending already: what counts where all go back, and there is work again
        )
        answers: Handlers = {
            partitioning.PartitionHere: lambda sender, event: registry.meet(sender, event.place, settings.partitions),
            grouping.Enter: self._on_enter,
            scripting.AskReached: self._on_ask,
            grouping.Halted: self._on_halted,
            grouping.RoundsMade: self._on_rounds,
            grouping.Broken: self._on_broken,
            grouping.Kept: self._on_kept,
            evaluating.Evaluated: self._on_evaluated,
            membership.Leave: self._on_leave,
            membership.Stop: self._on_stop,
            events.Saved: self._on_saved,
            events.Woke: self._on_woke,
            events.Lost: self._on_lost,
        }
        self._answers = Answers("the coordinator", self.heard, answers)

    def waits(self) -> str:
        """Return what the job waits for now, in one sentence.

        >>> from distbelief.core.portions import ANEW
        >>> from distbelief.strategies import Allreduce
        >>> AllreduceCoordinator(Settings(strategy=Allreduce(2)), True, ANEW).waits()
        'gathering: waits for replica 0, replica 1'
        """
        groups = self._groups
        who = groups.awaited
        if self._may(GroupMay.GATHER):
            who = [role for role in self._expected if role not in groups.here]
        elif self._out:
            return f"{self.phase}: waits for {groups.group[0]} to {self._duties[0][0]}"
        elif groups.group:
            who = groups.waits_for()
        waits = f"{self.phase}: waits for {', '.join(who)}"
        if self._may(GroupMay.GATHER) or groups.whole:
            return waits
        return f"{waits} to {f'meet in group {groups.number}' if groups.group else f'leave group {groups.number - 1}'}"

    def standing(self) -> dict[str, object]:
        """Return how far it is."""
        return {"phase": self.phase, "rounds": self.rounds, "group": self._groups.number}

    @property
    def epochs(self) -> int:
        """Return how many are done."""
        return self.data.completed if self.data else 0

    @property
    def _expected(self) -> list[str]:
        return [role for role in roles.leads(self.settings.mesh) if role not in self._registry.over]

    def _may(self, act: GroupMay) -> bool:
        """Return whether the phase allows it."""
        return act in GROUP_ALLOWED[self.phase]

    def _enter(self, phase: GroupPhase) -> None:
        self.phase = GROUP_PHASES.move(self.phase, phase)

    def _on_leave(self, sender: str, event: membership.Leave) -> list[Effect]:
        alone = self._groups.dealt == [sender]
        if self._may(GroupMay.DEAL) and event.stops:
            self._close(Cause.SCRIPT_STOPPED, f"the script of {sender} has stopped the job")
        elif self._may(GroupMay.DEAL) and alone:
            self._close(Cause.REPLICAS_LEFT, f"every replica is gone; the last was {sender}: {self._why_left}")
        if alone and not self._may(GroupMay.DISMISS):  # it waits, since nobody else holds the parameters
            return self._regroup()
        return self._ended(sender, self._why_left, -1, died=False)

    # forming groups

    def _on_enter(self, sender: str, event: grouping.Enter) -> list[Effect]:
        self._registry.begin(sender, event.incarnation)
        join = membership.Join(event.incarnation, event.layout, event.samples, event.batch_size, event.epochs)
        try:
            if self.plan is None:
                self.plan = admission.plan(self.settings, join)
                self.settings, self.data = self.plan.settings, self._round_batches(self.plan)
            admission.check(self.plan, sender, join)
        except (LayoutError, UsageError) as error:
            return [Send(sender, membership.Refused(str(error), isinstance(error, LayoutError)))]
        if self._may(GroupMay.DISMISS):
            return [Send(sender, membership.Finish("the job is ending"))]
        self._groups.enter(sender, event)
        if self._may(GroupMay.GATHER):
            return self._gathered()
        return [WriteRecord(records.Joined(sender)), *self._regroup()]

    def _on_ask(self, sender: str, event: scripting.AskReached) -> list[Effect]:
        position = self.data.position() if self.data else self._kept.position
        return [Send(sender, scripting.JobReached(position.earliest(sender), self._kept.checkpoint, self._resumed))]

    def _round_batches(self, plan: Plan) -> RoundBatches:
        """All that is to be done from the newest checkpoint on."""
        s = plan.settings
        return RoundBatches(plan.samples, s.batch_size, s.epochs, self._kept.position, reduction(s).accumulate)

    def _gathered(self) -> list[Effect]:
        """Begin, once all are there who will come."""
        here = self._groups.here
        if self.plan is None or self.data is None or not here or any(role not in here for role in self._expected):
            return []
        self._enter(GroupPhase.TRAINING)
        s, plan = self.settings, self.plan
        begun = records.Started(
            len(here), 0, plan.layout.parameters, plan.samples, s.batch_size, s.epochs, self.samples
        )
        effects: list[Effect] = [WriteRecord(begun), *(WriteRecord(records.Joined(role)) for role in here)]
        if self.data.finished:
            self._close(Cause.DONE_BEFORE, "every epoch was done before")
        return [*effects, *budget_timer(s), *self._regroup()]

    def _regroup(self) -> list[Effect]:
        """Have a group's members halt; where that was asked already, form the next once nobody is waited for."""
        halting = self._groups.break_up()
        self._out = False
        return [*(Send(role, grouping.Halt(self._groups.number)) for role in halting), *self._assemble()]

    def _on_halted(self, sender: str, event: grouping.Halted) -> list[Effect]:
        self._groups.halted(sender, event)
        return self._assemble()

    def _assemble(self) -> list[Effect]:
        """Form a group of all who are there, once all have halted."""
        groups = self._groups
        if self._may(GroupMay.GATHER) or groups.group or not groups.here or groups.awaited:
            return []
        assert self.plan is not None
        assert self.data is not None
        nothing = groups.most == grouping.NOTHING
        effects = self._rewind() if nothing and self.rounds else []
        checkpoint = self._kept.checkpoint if nothing else ""
        begins = self.rounds if nothing else groups.most
        members, source = groups.form(begins, alike=not checkpoint)
        assemble = grouping.Assemble(groups.number, self.plan, members, source, begins, self.samples, checkpoint)
        return [*effects, *(Send(role, assemble) for role in groups.group)]

    def _whole(self, rounds: int) -> list[Effect]:
        """All of a group hold what it begins with: what was dealt to the last and is not in that is dealt again."""
        assert self.data is not None
        groups = self._groups
        groups.whole = True
        effects = self._settle(rounds) if rounds > self.rounds else []
        effects += self._record_gone(self.data.recall())
        groups.dealt = groups.group
        return effects

    def _record_gone(self, lost: list[int]) -> list[Effect]:
        """Tell who is gone since the last group was formed, and how many minibatches of theirs are dealt again."""
        held = dict(zip(self._groups.dealt, lost, strict=False))
        effects: list[Effect] = [
            WriteRecord(records.Gone(role, held.get(role, 0), reason, died)) for role, reason, died in self._fallen
        ]
        self._fallen = []
        return effects

    def _rewind(self) -> list[Effect]:
        """Nobody is left who holds what the rounds have made: go back to the newest checkpoint, or to the beginning."""
        assert self.plan is not None
        held = self._record_gone(self._held)
        self.samples, self.rounds = self._kept.samples, 0
        self._pushes = self._minibatches = 0
        self._unmeasured.done = self._unmeasured_kept
        self._target.forget()
        self.data = self._round_batches(self.plan)
        if self._interrupted and self._cause is not Cause.INTERRUPTED:
            self._close(Cause.INTERRUPTED, self._interrupted)
        elif self._cause is not Cause.INTERRUPTED:
            self._enter(GroupPhase.TRAINING)
            self._cause, self._duties = Cause.EPOCHS_DONE, []
        whence = f"go back to checkpoint {self.number - 1}" if self._kept.checkpoint else "begin anew"
        text = f"every replica that held the parameters is gone; those that came again {whence}"
        return [*held, WriteRecord(records.Note(text)), WriteRecord(records.Rewound(self.samples))]

    def _on_broken(self, sender: str, event: grouping.Broken) -> list[Effect]:
        """A member cannot go on: should nobody have died, the same group is formed again."""
        if event.group != self._groups.number or sender not in self._groups.group or self._may(GroupMay.DISMISS):
            return []
        self._barren += 1
        if self._barren > BARREN:
            why = (
                f"{BARREN} groups of replicas broke up one after the other without a round; the last since "
                f"{event.reason}"
            )
            return self._end(Cause.NO_ROUND, why)
        sent_away = self._send_guests_away(event.reason) if self._barren >= BARREN_WITH_GUESTS else []
        return [
            *sent_away,
            WriteRecord(records.Note(f"{sender}: {event.reason}; the replicas form their group anew")),
            *self._regroup(),
        ]

    def _send_guests_away(self, reason: str) -> list[Effect]:
        """Go on without those who have joined from elsewhere."""
        effects: list[Effect] = []
        for role in [role for role in self._groups.here if role not in roles.leads(self.settings.mesh)]:
            self._groups.leave(role)
            self._fallen.append((role, f"its group did not come about: {reason}", False))
            effects.append(Send(role, membership.Refused(f"the group of replicas did not come about: {reason}", False)))
        return effects

    # dealing

    def _go_on(self) -> list[Effect]:
        """Deal to the group, unless somebody must do something first, or it is over."""
        assert self.data is not None
        effects: list[Effect] = []
        group = self._groups.group if self._groups.whole else []
        while group and self.data.out < AHEAD and (portion := self._deal(self.data, len(group))) is not None:
            effects += [Send(role, grouping.RoundBatch(self._groups.number, portion)) for role in group]
        if group and self._duties and not self._out and not self.data.out:
            self._out = True
            what, number = self._duties[0]
            if what is Duty.DISMISS:
                self._enter(GroupPhase.LEAVING)
                ending: list[Effect] = [WriteRecord(records.Ending.of(self._cause, self._reason))]
                return effects + ending + [Send(role, membership.Finish(self._reason)) for role in group]
            effects.append(
                Send(group[0], evaluating.Evaluate(number) if what is Duty.MEASURE else grouping.Keep(number))
            )
        return effects

    def _deal(self, data: RoundBatches, members: int) -> Portion | None:
        """The next round batch; None where nothing more is to be dealt before what is out is done."""
        if self._duties or not self._may(GroupMay.DEAL):
            return None
        whole = data.epochs_dealt
        if data.out and data.at_start and (self._measures_after(whole) or self._keeps_after(whole)):
            return None
        rounds = self._rounds_to_deal(members)
        return data.deal(members, rounds) if rounds else None

    def _rounds_to_deal(self, members: int) -> int:
        """Return how many may be dealt now: no more than there are to the next measure or checkpoint by minibatches."""
        s, held = self.settings, sum(self._held)
        every = (
            (s.evaluations.minibatches * self._evaluates, self._unmeasured.done),
            (s.snapshots.minibatches, self._minibatches),
        )
        left = [max(0, -(-(whole - done - held) // members)) for whole, done in every if whole]
        return min(ROUNDS_LIMIT, s.snapshots.pushes or ROUNDS_LIMIT, *left)

    def _measures_after(self, epoch: int) -> bool:
        return self._evaluates and is_due(self.settings.evaluations.epochs, epoch)

    def _keeps_after(self, epoch: int) -> bool:
        return is_due(self.settings.checkpoint_every, epoch)

    def _on_rounds(self, sender: str, event: grouping.RoundsMade) -> list[Effect]:
        before = self._told.get(sender)
        loss, losses = (before.loss, before.losses) if before else (0.0, 0)
        self._told[sender] = grouping.RoundsMade(event.group, event.rounds, loss + event.loss, losses + event.losses)
        rounds = self._groups.report(sender, event)
        if rounds is None:
            return []
        if not self._groups.whole:
            return self._whole(rounds) + self._go_on()
        return (self._settle(rounds) if rounds > self.rounds else []) + self._go_on()

    def _settle(self, rounds: int) -> list[Effect]:
        """So many rounds are done by all who are there, or by one from whom the others have them."""
        assert self.data is not None
        before = self.data.completed
        shares = self.data.settle(rounds - self.rounds)
        self._pushes += rounds - self.rounds
        done = sum(share.steps for share in shares)
        self._minibatches += done
        self._unmeasured.add(done)
        self.rounds = rounds
        self._barren = 0
        self.samples += sum(share.samples for share in shares)
        effects: list[Effect] = [
            WriteRecord(self._stepped(role, share))
            for role, share in zip(self._groups.dealt, shares, strict=True)
            if share.steps
        ]
        for epoch in range(before + 1, self.data.completed + 1):
            effects.append(WriteRecord(records.EpochDone(epoch)))
            if self._may(GroupMay.DEAL) and not self.data.finished:
                self._duties += [(Duty.MEASURE, epoch)] * self._measures_after(epoch)
                self._duties += [(Duty.KEEP, self.number)] * self._keeps_after(epoch)
        if self.data.finished and self._may(GroupMay.DEAL):
            self._close(Cause.EPOCHS_DONE, "all epochs are done")
        return effects + self._in_time()

    def _stepped(self, role: str, share: Share) -> records.Stepped:
        report = self._told.pop(role, None)
        losses = report.losses if report else 0
        loss = report.loss / losses if report and losses else None
        return records.Stepped(role, share.steps, share.samples, share.steps, loss, 0, losses)

    # what the first member does for all

    def _in_time(self) -> list[Effect]:
        """Ask for a checkpoint by the pushes made, and set the clock for the next where any were made."""
        if snapshot_due(self.settings, self._pushes, minibatches=self._minibatches):
            self._want_checkpoint()
        every = self.settings.evaluations.minibatches * self._evaluates
        if self._may(GroupMay.DEAL) and self._unmeasured.due(every):
            self._duties.append((Duty.MEASURE, self.epochs))
        return self._timer.start(self.settings, self._pushes) if self._may(GroupMay.DEAL) else []

    def _want_checkpoint(self) -> None:
        self._pushes = self._minibatches = 0
        if self._may(GroupMay.DEAL) and not any(what is Duty.KEEP for what, _ in self._duties):
            self._duties.append((Duty.KEEP, self.number))

    def _on_woke(self, sender: str, event: events.Woke) -> list[Effect]:
        if isinstance(event.timer, BudgetSpent):
            if self._may(GroupMay.DEAL):
                self._close(Cause.BUDGET_SPENT, budget_spent(self.settings))
            return self._go_on()
        self._timer.woke()
        if not self._may(GroupMay.DEAL) or not self._pushes:
            return []
        self._want_checkpoint()
        return self._go_on()

    def _on_evaluated(self, sender: str, event: evaluating.Evaluated) -> list[Effect]:
        if not self._is_done(Duty.MEASURE, sender):
            return []
        tested = records.Tested(event.number, event.loss, event.accuracy, event.metrics, event.seconds)
        effects: list[Effect] = [WriteRecord(tested)]
        reached = self._target.reached(self.settings, tested)
        if reached and self._may(GroupMay.DEAL):
            self._close(Cause.TARGET_REACHED, reached, measured=True)
        return effects + self._go_on()

    def _does(self, what: Duty, sender: str) -> bool:
        return self._out and self._groups.group[:1] == [sender] and self._duties[0][0] is what

    def _is_done(self, what: Duty, sender: str) -> bool:
        """Return whether this answers what the first member was asked for last; the next may be asked for then."""
        if not self._does(what, sender):
            return False
        self._duties.pop(0)
        self._out = False
        return True

    def _on_kept(self, sender: str, event: grouping.Kept) -> list[Effect]:
        if event.number != self.number or not self._does(Duty.KEEP, sender):
            return []
        assert self.plan is not None
        assert self.data is not None
        self._failed, self._updates, self._cut = event.error, event.updates, self.data.position()
        if event.error:
            return [Discard(event.number)]
        return [Commit(event.number, self.plan, self._cut, self.samples, event.script)]

    def _on_saved(self, sender: str, event: events.Saved) -> list[Effect]:
        error = self._failed or event.error
        effects: list[Effect] = [WriteRecord(records.Checkpointed(event.number, error))]
        self.number += 1
        self._pushes = self._minibatches = 0
        if not error:
            self._kept = StartingPoint(event.checkpoint, self._cut, self.samples, self.number)
            self._unmeasured_kept = self._unmeasured.done
        self._duties = [(what, self.number if what is Duty.KEEP else number) for what, number in self._duties]
        if self._duties and self._duties[0][0] is Duty.KEEP:
            self._duties.pop(0)
        self._out = False
        if not self._may(GroupMay.DEAL):
            self._cause, self._reason = records.ended(self._cause, self._reason, error)
        return effects + self._go_on()

    # the end

    def _close(self, cause: Cause, reason: str, measured: bool = False) -> None:
        """Have the first member do what is left, then let all go."""
        self._enter(GroupPhase.CLOSING)
        self._cause, self._reason = cause, reason
        measures = self._evaluates and self.settings.evaluates and not measured and cause is not Cause.INTERRUPTED
        self._duties = [(Duty.MEASURE, self.epochs)] * measures
        self._duties += [(Duty.KEEP, self.number), (Duty.DISMISS, 0)]

    def _on_stop(self, sender: str, event: membership.Stop) -> list[Effect]:
        if self._may(GroupMay.GATHER):
            return self._end(Cause.INTERRUPTED, event.reason)
        if not self._may(GroupMay.DEAL):
            self._interrupted = event.reason
            return []
        self._close(Cause.INTERRUPTED, event.reason)
        return self._regroup()

    def _end(self, cause: Cause, reason: str, role: str = "") -> list[Effect]:
        stops: list[Effect] = [Send(role, membership.Stop(reason)) for role in self._groups.here]
        dealt = self._groups.dealt
        applied = (
            [WriteRecord(records.Applied(dealt[0], self._updates, self.samples, {0: self._updates}))] if dealt else []
        )
        return [*applied, WriteRecord(records.Finished.of(cause, reason, role)), *stops, End(reason)]

    # death

    def _on_lost(self, sender: str, event: events.Lost) -> list[Effect]:
        return self._ended(sender, event.reason, event.incarnation, died=True)

    def _ended(self, sender: str, reason: str, incarnation: int, died: bool) -> list[Effect]:
        """A process of a replica has ended, or leaves: so has the replica."""
        if self._may(GroupMay.DISMISS) and not roles.is_lead(sender):
            return []  # it was done before its lead, which leaves for it
        return self._without(roles.lead_of(sender), reason, incarnation, died)

    def _without(self, role: str, reason: str, incarnation: int, died: bool) -> list[Effect]:
        """Go on without a replica, or end."""
        if not self._registry.end(role, incarnation, died):
            return []
        member = self._groups.leave(role)
        if not member and role not in roles.leads(self.settings.mesh):
            return []  # a guest that was refused, or sent away
        self._fallen.append((role, reason, died))
        if member and self._may(GroupMay.REGROUP) and self._expected:
            if not died or reduction(self.settings).on_death == "regroup":
                return self._regroup()
            return self._record_gone(self._held) + self._end(
                Cause.DEATH_FORBIDDEN, f"{role} is gone ({reason}), and --on-death is stop", role
            )
        effects = self._record_gone(self._held)
        if self._may(GroupMay.DISMISS):
            return effects if self._groups.here else effects + self._end(self._cause, self._reason)
        if not self._expected and not self._groups.here:
            return effects + self._end(
                Cause.REPLICAS_DIED if died else Cause.REPLICAS_LEFT,
                f"every replica is gone; the last was {role}: {reason}",
            )
        return effects + (self._gathered() if self._may(GroupMay.GATHER) else self._regroup())

    @property
    def _why_left(self) -> str:
        return "it was done" if self._may(GroupMay.DISMISS) else "it goes early"

    @property
    def _held(self) -> list[int]:
        """Minibatches that each member of the last group holds."""
        return self.data.held() if self.data else []
