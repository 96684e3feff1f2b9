"""Work of a batch method: it runs as a client, for which replicas compute work units and shards operate on vectors.

The coordinator sees only scalars. Between two iterations the job rests, and checkpoints are made: they hold the
parameters, the history, and the few numbers with which the method goes on. When a shard without a standby dies, all go
back to the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import records
from distbelief.core.conversations import operations
from distbelief.core.conversations.operations import AnyCommand, Copy
from distbelief.core.conversations.phases import May
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.records import Cause
from distbelief.errors import RemoteProtocolError
from distbelief.server.machine import Handlers
from distbelief.strategies.sandblaster.evaluating import Evaluating
from distbelief.strategies.sandblaster.methods import X0, X
from distbelief.strategies.sandblaster.settings import Descent
from distbelief.strategies.sandblaster.stories import AskEvaluation, AskOperation, Descend, IterationDone, Steps


class BatchWork:
    """Dealer of the evaluations of a batch method."""

    def __init__(self) -> None:
        self._story: Steps[tuple[Cause, str]] | None = None
        self._answer: object = None
        self._waits = False
        """True while the method waits for an answer."""
        self._resting, self._due = True, False
        self._operation = 0
        self._unanswered: list[operations.Operate] = []
        """Operations that some shard may not have done: a shard that restarts gets them again."""
        self._kinds: tuple[str, ...] = ()
        self._scalars: dict[str, tuple[float, ...]] = {}

    def handlers(self, job: Coordinator) -> Handlers:
        return {operations.Done: partial(self._done, job), operations.Operated: partial(self._operated, job)}

    def begin(self, job: Coordinator) -> Evaluating:
        """Start the method at the newest checkpoint; evaluations that are under way are dropped."""
        assert job.plan is not None
        last = job.data.evaluation if isinstance(job.data, Evaluating) else 0
        work = Evaluating(job.plan, job.saving.position, job.saving.samples, last)
        self._story = Descend(job.plan.settings.own(Descent), job.plan.settings.epochs, work.state).story()
        self._answer, self._waits, self._resting, self._due = None, False, True, False
        self._kinds, self._unanswered = (), []
        return work

    def again(self, shard: str) -> list[Effect]:
        return [Send(shard, operate) for operate in self._unanswered]

    def defers(self) -> bool:
        """Return whether a checkpoint must wait for the end of the iteration; it is due then."""
        self._due |= not self._resting
        return not self._resting

    def end(self, job: Coordinator) -> list[Effect]:
        """Go back to the start of the line search, since the parameters that a search tries are not the model."""
        _dealt(job).abandon()
        return self._operate(job, (Copy(X0, X),))

    # the method

    def deal(self, job: Coordinator) -> list[Effect]:
        effects = self._play(job)
        return effects + (_dealt(job).deal(job.membership.served) if job.may(May.DEAL) else [])

    def _play(self, job: Coordinator) -> list[Effect]:
        effects: list[Effect] = []
        while job.may(May.DEAL) and not self._waits and not job.saving.holds and job.shards.ready:
            assert self._story is not None
            self._resting, answer, self._answer = False, self._answer, None
            try:
                request = self._story.send(answer)
            except StopIteration as end:
                return effects + job.finish(*end.value)
            if isinstance(request, AskEvaluation):
                gather = _dealt(job).begin(request.batch, job.membership.served)
                self._waits = True
                effects += self._operate(job, (*request.commands, gather))
            elif isinstance(request, AskOperation):
                effects += self._operate(job, request.commands)
                self._waits = bool(self._kinds)
                self._answer = []
            else:
                effects += self._iterated(job, request)
        return effects

    def _operate(self, job: Coordinator, commands: Sequence[AnyCommand]) -> list[Effect]:
        self._operation += 1
        self._kinds, self._scalars = tuple(kind for command in commands for kind in operations.scalars(command)), {}
        unready = job.shards.unready  # these shards get the operation when they are ready
        self._unanswered.append(operate := operations.Operate(self._operation, tuple(commands)))
        return [Send(shard, operate) for shard in job.shards.roles if shard not in unready]

    def _iterated(self, job: Coordinator, done: IterationDone) -> list[Effect]:
        """Rest between two iterations: record, evaluate, save."""
        work, self._resting = _dealt(job), True
        counts = (done.evaluations, work.again)
        work.again = 0
        effects: list[Effect] = [
            WriteRecord(records.Iterated(done.iteration, done.loss, done.gradient, done.step, *counts, done.note))
        ]
        if done.note:
            effects.append(WriteRecord(records.Note(f"iteration {done.iteration}: {done.note}")))
        if done.iteration == work.epochs:  # the search failed, so the parameters are those before it
            return effects
        work.advance(done.iteration - 1, done.state)
        effects += job.epoch_done(work)
        armed, pushes = job.saving.in_time(work)
        due, self._due = self._due or pushes, False
        return [*effects, *armed, *(job.save() if due and job.may(May.DEAL) else [])]

    # reports

    def _operated(self, job: Coordinator, sender: str, event: operations.Operated) -> list[Effect]:
        if event.number != self._operation or not self._kinds or not job.may(May.DEAL):
            return []  # the answer is older than the last return to a checkpoint, or the job ends
        if sender not in job.shards.roles or len(event.scalars) != len(self._kinds):
            raise RemoteProtocolError(
                f"{sender} answers with {len(event.scalars)} scalars, {len(self._kinds)} are wanted of each shard"
            )
        self._scalars[sender] = event.scalars  # a shard that restarts may answer again, with the same scalars
        if len(self._scalars) < len(job.shards.roles):
            return []
        shares = [self._scalars[role] for role in job.shards.roles]
        self._answer = [
            max(share) if kind == "max" else sum(share)
            for kind, share in zip(self._kinds, zip(*shares, strict=True), strict=True)
        ]
        self._waits, self._kinds, self._unanswered = False, (), []
        return self.deal(job)

    def _done(self, job: Coordinator, sender: str, event: operations.Done) -> list[Effect]:
        if sender not in job.membership.members or job.data is None:
            raise RemoteProtocolError(f"{sender} has done a work unit but is no member")
        if not job.membership.heeds(sender):
            return []
        work = _dealt(job)
        work_unit, effects = work.done(sender, event)
        if work_unit is None:
            return self._more(job, sender)
        samples, steps = work.samples_of(work_unit), work_unit.portion.count
        effects.append(WriteRecord(records.Stepped(sender, steps, samples, 1, event.loss / samples, 0, steps)))
        if job.may(May.DEAL) and (loss_sum := work.take()) is not None:
            self._answer, self._waits = loss_sum, False
            return effects + self.deal(job)
        withdrawn = {effect.to for effect in effects if isinstance(effect, Send)} | {sender}
        return effects + [more for role in sorted(withdrawn) for more in self._more(job, role)]

    def _more(self, job: Coordinator, role: str) -> list[Effect]:
        return _dealt(job).deal((role,)) if job.may(May.DEAL) and role in job.membership.served else []


def _dealt(job: Coordinator) -> Evaluating:
    assert isinstance(job.data, Evaluating)
    return job.data
