"""Work of a group: round batches, each dealt to all members. Rounds that are not done when a group breaks up are dealt
again, so that every minibatch is in exactly one update.
"""

from __future__ import annotations

from functools import partial

from distbelief.coordination.coordinator import Coordinator, DealtWork, Handlers
from distbelief.core import records
from distbelief.core.conversations import dealing, initialising
from distbelief.core.conversations.phases import May
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.outcomes import Cause
from distbelief.strategies.grouped.group_holders import GroupHolders, dealt
from distbelief.strategies.grouped.round_batches import ROUNDS_LIMIT, RoundBatches
from distbelief.strategies.grouped.settings import reduction


class RoundWork(DealtWork):
    """Dealer of rounds to a group.

    Args:
        holders: the group.
    """

    def __init__(self, holders: GroupHolders) -> None:
        self._holders = holders
        self._losses: dict[str, tuple[float, int]] = {}
        """Sum and number of the losses that each member has reported for rounds that some have not made."""

    def handlers(self, job: Coordinator) -> Handlers:
        """Return handlers of members that report rounds, or that have taken their group's state."""
        return {dealing.Progress: partial(self._progress, job), initialising.Restored: partial(self._restored, job)}

    def begin(self, job: Coordinator) -> RoundBatches:
        """Return the job's rounds, from the newest checkpoint on."""
        assert job.plan is not None
        return RoundBatches(job.plan, job.saving.position, job.saving.samples, reduction(job.settings).accumulate)

    def deal(self, job: Coordinator) -> list[Effect]:
        """Deal two round batches ahead, up to the next evaluation or checkpoint; none while one is under way."""
        data, group = dealt(job), self._holders.group
        effects: list[Effect] = []
        if not self._holders.whole or job.saving.holds or job.evaluations.pending:
            return effects
        if data.finished:  # the job went back to a checkpoint at the end of the data
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
