"""Replicas that each hold all parameters, and form a group, time and again, to add up their gradients.

A group is formed in three steps. All replicas halt and report their rounds. One of those with the most rounds becomes
the source of the state that others lack. All get the list of members, and take the state. Then the group is whole.

A whole group is dealt round batches, each to all members. Rounds that are not done when it breaks up are dealt again,
so that every minibatch is in exactly one update.
"""

from __future__ import annotations

from functools import partial

from distbelief.coordination.closing import ClosingStep
from distbelief.coordination.coordinator import Coordinator, DealtWork, Holders
from distbelief.core import events, records, roles
from distbelief.core.conversations import dealing, grouping, initialising, membership
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.grouping import NOTHING
from distbelief.core.conversations.phases import May, Phase
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.records import Cause
from distbelief.errors import RemoteProtocolError
from distbelief.server.machine import Handlers
from distbelief.strategies.grouped.round_batches import ROUNDS_LIMIT, RoundBatches
from distbelief.strategies.grouped.settings import reduction

BARREN, BARREN_WITH_GUESTS = 5, 2
"""Groups in a row that may break up without a round or a death; and the same with guests, whom some may not reach."""


class GroupHolders(Holders):
    """The replicas of a job that reduce among themselves."""

    def __init__(self) -> None:
        self.group: list[str] = []
        """The members in order of rank; empty while a group is formed."""
        self.whole = False
        """True once all members have the state that the group began with."""
        self.number = 0
        """Number of the group, or of the next one while that is formed."""
        self.rounds: dict[str, int] = {}
        """Rounds that each replica has reported; a replica without state is not in it."""
        self.barren = 0
        """Groups since the last round that broke up without a death."""
        self._awaited: set[str] = set()
        """Replicas that are to halt, or, in a group that is formed, to take the state that it begins with."""
        self._begins = 0
        self._joins: dict[str, tuple[tuple[membership.PartPlace, ...], str]] = {}

    def handlers(self, job: Coordinator) -> Handlers:
        return {
            membership.Join: partial(self._join, job),
            grouping.Halted: partial(self._halted, job),
            grouping.Broken: partial(self._broken, job),
            events.Lost: partial(self._lost, job),
        }

    def roles(self, job: Coordinator) -> list[str]:
        """Return the first replica that holds the parameters."""
        return sorted(self.rounds, key=roles.index_of)[:1]

    def ready(self, job: Coordinator) -> bool:
        """Return whether all members hold the same state, or nobody is left."""
        return self.whole or not job.membership.everybody

    def waits(self, job: Coordinator) -> list[str]:
        who = sorted(self._awaited, key=roles.index_of)
        if not self.group and not who:
            return self._missing(job)
        return [
            f"{role} to {f'meet in group {self.number}' if self.group else f'leave group {self.number - 1}'}"
            for role in who
        ]

    def _missing(self, job: Coordinator) -> list[str]:
        """Return the replicas of the job that are absent and still to come."""
        known = {*job.membership.everybody, *job.registry.over}
        return [role for role in roles.leads(job.settings.mesh) if role not in known]

    # joining

    def _join(self, job: Coordinator, sender: str, event: membership.Join) -> list[Effect]:
        if len(event.places) != job.settings.partitions:
            raise RemoteProtocolError(f"{sender} joins a group with {len(event.places)} places for its partitions")
        self._joins[sender] = event.places, event.digest
        return job.join(sender, event)

    def restore(self, job: Coordinator) -> list[Effect]:
        """Form the first group once all awaited replicas are present."""
        if job.may(May.GATHER):
            job.enter(Phase.INITIALISING)
        return self.initialise(job)

    def initialise(self, job: Coordinator) -> list[Effect]:
        """Form the group anew unless its members are exactly the replicas that are present."""
        return [] if self.group and {*self.group} == {*job.membership.everybody} else self.regroup(job)

    def welcome(self, job: Coordinator) -> list[Effect]:
        """Form the group anew for new replicas; admit the members of a whole group, whose first one measures."""
        effects = self.initialise(job)
        if not self.whole:
            return effects
        for role in job.membership.callers():
            if job.membership.admit(role):
                effects.append(WriteRecord(records.Joined(role)))
            if job.may(May.DISMISS):
                effects.append(Send(role, membership.Finish(job.closing.reason)))
        if job.evaluations.expected:
            effects += job.evaluations.joined(job.epochs, self.group[0])
        return effects

    # forming groups

    def regroup(self, job: Coordinator) -> list[Effect]:
        """Halt the group's members; while they already halt, form the next group once the last one has."""
        halts: list[Effect] = []
        if self.group:
            self.number += 1
            self._awaited = {*self.group} & {*job.membership.everybody}
            halts = [Send(role, grouping.Halt(self.number)) for role in self.group if role in self._awaited]
            self.group, self.whole, job.evaluations.who = [], False, ""
        return halts + self._form(job)

    def _halted(self, job: Coordinator, sender: str, event: grouping.Halted) -> list[Effect]:
        if self.group or event.group != self.number or sender not in self._awaited:
            return []
        self._awaited.discard(sender)
        if event.rounds != NOTHING:
            self.rounds[sender] = event.rounds
        return self._form(job)

    def _form(self, job: Coordinator) -> list[Effect]:
        """Form a group of all present replicas once all have halted; the first one waits for all of the job's."""
        if job.plan is None or self._awaited:
            return []
        here, missing = sorted(job.membership.everybody, key=roles.index_of), self._missing(job)
        nothing = not self.rounds
        effects = self._rewind(job) if nothing and dealt(job).rounds and (here or missing) else []
        if not here or (not self.number and missing) or (effects and not job.may(May.DEAL)):
            return effects
        self._begins = max(self.rounds.values(), default=0)
        source = next(i for i, role in enumerate(here) if nothing or self.rounds.get(role) == self._begins)
        checkpoint = job.saving.newest if nothing else ""
        members = []
        for i, role in enumerate(here):
            [lead, *parts], digest = self._joins[role]
            # at the start, a replica whose initial parameters are equal to the source's needs no state
            alike = nothing and not checkpoint and digest == self._joins[here[source]][1]
            needs = i != source and not alike and self.rounds.get(role) != self._begins
            members.append(grouping.Member(role, lead.place, needs, lead.store, tuple(parts)))
        self.group, self._awaited = here, {*here}
        assemble = grouping.Assemble(
            self.number, job.plan, tuple(members), source, self._begins, dealt(job).samples, checkpoint
        )
        return [*effects, *(Send(role, assemble) for role in here)]

    def restored(self, sender: str) -> bool:
        """Note that a member has the state that its group begins with; return whether all have it now."""
        if not self.group or sender not in self._awaited:
            return False
        self._awaited.discard(sender)
        self.rounds[sender] = self._begins
        self.whole = not self._awaited
        return self.whole

    def _broken(self, job: Coordinator, sender: str, event: grouping.Broken) -> list[Effect]:
        """Form the group anew, as a member cannot go on, or end the job if that has failed too often."""
        if event.group != self.number or sender not in self.group:
            return []
        self.barren += 1
        if self.barren > BARREN:
            why = (
                f"{BARREN} groups of replicas broke up one after the other without a round; the last since "
                f"{event.reason}"
            )
            return job.end(Cause.NO_ROUND, why)
        note = WriteRecord(records.Note(f"{sender}: {event.reason}; the replicas form their group anew"))
        guests = [role for role in self.group if role not in roles.leads(job.settings.mesh)]
        effects = [note, *self.regroup(job)]
        if self.barren < BARREN_WITH_GUESTS:
            return effects
        return effects + job.send_away(guests, f"the group of replicas did not come about: {event.reason}")

    # leaving

    def _lost(self, job: Coordinator, sender: str, event: events.Lost) -> list[Effect]:
        role, members = roles.lead_of(sender), {*job.membership.members}
        effects = job.lose(sender, event)
        stops = reduction(job.settings).on_death == "stop" and role in members - job.membership.members
        if not stops or not job.membership.members:
            return effects
        return effects + job.end(
            Cause.DEATH_FORBIDDEN, f"{role} is gone ({event.reason}), and --on-death is stop", role
        )

    def without(self, job: Coordinator, replica: str, reason: str) -> list[Effect]:
        """Form a group without a dead replica, and give its requests to another."""
        saving, closing, here = job.saving, job.closing, job.membership.everybody
        self.rounds.pop(replica, None)
        self._awaited.discard(replica)
        if replica == job.evaluations.measuring or not (here or self._missing(job)):
            job.evaluations.gone(for_good=not (here or self._missing(job)))
        effects: list[Effect] = []
        described, unmade = replica in closing.describing, replica in saving.writing
        closing.describing.discard(replica)
        if unmade or (saving.stage is CheckpointStage.HOLDING and not here):
            effects += job.give_up(f"{replica} is gone ({reason})")
            saving.again = saving.stage is CheckpointStage.SEALING
        if job.may(May.CLOSE) and (unmade or described):
            closing.steps = [*([ClosingStep.SAVE] if unmade else []), ClosingStep.DESCRIBE, ClosingStep.STOP]
        return effects + self.initialise(job)

    def _rewind(self, job: Coordinator) -> list[Effect]:
        """Go back to the newest checkpoint, or to the start: every replica that held later rounds is dead."""
        again, notes = job.closing.go_back() if job.may(May.DISMISS) else (True, [])
        data = job.return_to_checkpoint()
        job.membership.done.clear()
        whence = f"go back to checkpoint {job.saving.kept}" if job.saving.newest else "begin from the start"
        text = f"every replica that held the parameters is gone; those that joined again {whence}"
        effects = [*notes, WriteRecord(records.Note(text)), WriteRecord(records.Rewound(data.samples, job.epochs))]
        if not again:
            return effects + job.end(job.closing.cause, job.closing.reason)
        job.enter(Phase.TRAINING)
        return effects


def dealt(job: Coordinator) -> RoundBatches:
    """Return the round batches of a job."""
    assert isinstance(job.data, RoundBatches)
    return job.data


class RoundWork(DealtWork):
    """Dealer of rounds to a group."""

    def __init__(self, holders: GroupHolders) -> None:
        self._holders = holders
        self._losses: dict[str, tuple[float, int]] = {}
        """Sum and number of the losses that each member has reported for rounds that some have not made."""

    def handlers(self, job: Coordinator) -> Handlers:
        return {dealing.Progress: partial(self._progress, job), initialising.Restored: partial(self._restored, job)}

    def begin(self, job: Coordinator) -> RoundBatches:
        assert job.plan is not None
        return RoundBatches(job.plan, job.saving.position, job.saving.samples, reduction(job.settings).accumulate)

    def deal(self, job: Coordinator) -> list[Effect]:
        """Deal two round batches ahead, up to the next evaluation or checkpoint; none while one is under way."""
        data, group = dealt(job), self._holders.group
        effects: list[Effect] = []
        if not self._holders.whole or job.saving.holds or job.evaluations.pending:
            return effects
        if data.finished:  # the job has gone back to a checkpoint at the end of the data
            return job.finish(Cause.EPOCHS_DONE, "all epochs are done")
        while data.out <= ROUNDS_LIMIT:
            before = job.until_due(data, data.width(group))
            if (portion := data.deal(group, before)) is None:
                break
            effects += [Send(role, dealing.Deal(portion)) for role in group]
        return effects

    def end(self, job: Coordinator) -> list[Effect]:
        """Break off the rounds that are under way: all replicas end with the same number."""
        return self._holders.regroup(job) if dealt(job).out else []

    def _progress(self, job: Coordinator, sender: str, event: dealing.Progress) -> list[Effect]:
        loss, losses = self._losses.get(sender, (0.0, 0))
        self._losses[sender] = loss + event.loss, losses + event.losses
        holders = self._holders
        if not holders.whole or sender not in holders.group:
            return []  # a late report of a group that broke up: its members report their rounds when they halt
        holders.rounds[sender] += event.pushes
        return self._settle(job, min(holders.rounds[role] for role in holders.group))

    def _restored(self, job: Coordinator, sender: str, _: initialising.Restored) -> list[Effect]:
        if not self._holders.restored(sender):
            return []
        if job.may(May.INITIALISE):
            return job.begin()
        effects = self._settle(job, self._holders.rounds[sender], recalls=True)
        return [*effects, *self._holders.welcome(job), *job.go_on()]

    def _settle(self, job: Coordinator, rounds: int, recalls: bool = False) -> list[Effect]:
        """Note that all members have made so many rounds; in a new group, deal the rest again."""
        data, before = dealt(job), dealt(job).minibatches
        shares = data.settle(rounds - data.rounds)
        if recalls:
            data.recall()
        if not shares:
            return []
        self._holders.barren = 0
        effects: list[Effect] = []
        for role, (steps, samples) in shares.items():
            loss, losses = self._losses.pop(role, (0.0, 0))
            mean = loss / losses if losses else None
            effects.append(WriteRecord(records.Stepped(role, steps, samples, steps, mean, 0, losses)))
        return effects + job.applied(data, data.completed - data.epochs, data.minibatches - before)
