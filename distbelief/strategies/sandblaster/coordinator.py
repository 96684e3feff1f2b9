"""The coordinator of Sandblaster: it plays the story of a batch method, has replicas compute work units of portions,
and
shards operate on vectors.

It sees scalars only. Between two iterations the job is at rest: then there are checkpoints, which hold the parameters,
the history and, as the position, the few numbers that the story goes on with. When a shard dies and has no standby, all
go back to the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distbelief.coordination.coordinator import Coordinator
from distbelief.coordination.dealing import DataDealer
from distbelief.core import records, roles
from distbelief.core.conversations import initialising, operations
from distbelief.core.conversations.operations import AnyCommand, Copy
from distbelief.core.conversations.phases import May
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.outcomes import Cause
from distbelief.core.portions import START, Position
from distbelief.core.protocol import BATCHED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan, Settings
from distbelief.errors import RemoteProtocolError
from distbelief.strategies.sandblaster.evaluating import Evaluating
from distbelief.strategies.sandblaster.settings import Descent
from distbelief.strategies.sandblaster.stories import X0, AskEvaluation, AskOperation, Descend, IterationDone, Steps, X


class SandblasterCoordinator(Coordinator):
    """The coordinator of one job; its arguments are those of every coordinator."""

    heard = heard_by(Kind.COORDINATOR, BATCHED)

    def __init__(
        self,
        settings: Settings,
        evaluator: bool = True,
        checkpoint: str = "",
        position: Position = START,
        samples: int = 0,
        number: int = 1,
    ) -> None:
        super().__init__(settings, evaluator, checkpoint, position, samples, number)
        self._story: Steps | None = None
        self._answer: Any = None
        self._waits = False
        """Whether the story waits for an answer."""
        self._resting, self._due, self._begun = True, False, False
        self._served: set[str] = set()
        """The replicas that hold the shards' parameters, and may be dealt work units."""
        self._operation = 0
        self._told: list[operations.Operate] = []
        """What not every shard is known to have done: the next life of one is told again."""
        self._kinds: tuple[str, ...] = ()
        self._scalars: dict[str, tuple[float, ...]] = {}

    def _take_work(self) -> Mapping[type, Callable[..., list[Effect]]]:
        return {operations.Done: self._on_done, operations.Operated: self._on_operated}

    @property
    def _work(self) -> Evaluating:
        assert isinstance(self.data, Evaluating)
        return self.data

    def _dealing(self, plan: Plan) -> DataDealer:
        last = self.data.evaluation if isinstance(self.data, Evaluating) else 0
        work = Evaluating(plan, self._saving.position, self._saving.samples, last)
        self._story = Descend(plan.settings.own(Descent), plan.settings.data.epochs, work.state).story()
        self._answer, self._waits, self._resting, self._due = None, False, True, False
        self._kinds, self._told = (), []  # what shards that have fallen still answer is nobody's
        self._served.clear()
        return work

    # the story

    def _begin(self) -> list[Effect]:
        effects = super()._begin()
        self._begun = True
        return effects + (self._deal() if self._may(May.DEAL) else [])

    def _deal(self) -> list[Effect]:
        """Let the story go on as far as it can, and give work to all who have room for it."""
        effects = self._play_story()
        return effects + (self._work.deal(self._served) if self._may(May.DEAL) else [])

    def _play_story(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._begun and self._may(May.DEAL) and not self._waits and not self._saving.holds and self._shards.ready:
            assert self._story is not None
            self._resting, answer, self._answer = False, self._answer, None
            try:
                asked = self._story.send(answer)
            except StopIteration as end:
                return effects + self._finish(*end.value)
            if isinstance(asked, AskEvaluation):
                gather = self._work.begin(asked.batch, self._served)
                self._waits = True
                effects += self._operate((*asked.commands, gather))
            elif isinstance(asked, AskOperation):
                effects += self._operate(asked.commands)
                self._waits = bool(self._kinds)
                self._answer = []
            else:
                effects += self._iterated(asked)
        return effects

    def _operate(self, commands: Sequence[AnyCommand]) -> list[Effect]:
        self._operation += 1
        self._kinds, self._scalars = tuple(kind for command in commands for kind in operations.scalars(command)), {}
        unready = self._shards.unready  # they are told later
        self._told.append(told := operations.Operate(self._operation, tuple(commands)))
        return [Send(shard, told) for shard in self._shards.roles if shard not in unready]

    def _on_restored(self, sender: str, event: initialising.Restored) -> list[Effect]:
        awaited = sender in self._shards.unready
        again: list[Effect] = [Send(sender, told) for told in self._told]
        effects = super()._on_restored(sender, event)
        return again + effects if awaited and sender not in self._shards.unready else effects

    def _iterated(self, done: IterationDone) -> list[Effect]:
        """At rest between two iterations: write down, measure, save."""
        work, self._resting = self._work, True
        counts = (done.evaluations, work.again)
        work.again = 0
        effects: list[Effect] = [
            WriteRecord(records.Iterated(done.iteration, done.loss, done.gradient, done.step, *counts, done.note))
        ]
        if done.note:
            effects.append(WriteRecord(records.Note(f"iteration {done.iteration}: {done.note}")))
        if done.iteration == work.epochs:  # the search failed: there is nothing new
            return effects
        work.advance(done.iteration - 1, done.state)
        effects += self._epoch_done(work)
        armed, pushes = self._saving.in_time(work)
        due, self._due = self._due or pushes, False
        return [*effects, *armed, *(self._save() if due and self._may(May.DEAL) else [])]

    def _on_operated(self, sender: str, event: operations.Operated) -> list[Effect]:
        if event.number != self._operation or not self._kinds or not self._may(May.DEAL):
            return []  # of before all went back, or before the end
        if sender not in self._shards.roles or len(event.scalars) != len(self._kinds):
            raise RemoteProtocolError(
                f"{sender} answers with {len(event.scalars)} scalars, {len(self._kinds)} are wanted of each shard"
            )
        self._scalars[sender] = event.scalars  # one that has come again may answer again, with the same
        if len(self._scalars) < len(self._shards.roles):
            return []
        shares = [self._scalars[role] for role in self._shards.roles]
        self._answer = [
            max(share) if kind == "max" else sum(share)
            for kind, share in zip(self._kinds, zip(*shares, strict=True), strict=True)
        ]
        self._waits, self._kinds, self._told = False, (), []
        return self._deal()

    def _on_done(self, sender: str, event: operations.Done) -> list[Effect]:
        if sender not in self._membership.members or self.data is None:
            raise RemoteProtocolError(f"{sender} has done a work unit and is no member")
        if not self._membership.heeds(sender):
            return []
        work_unit, effects = self._work.done(sender, event)
        if work_unit is None:
            return [
                WriteRecord(records.Stepped(sender, 0, 0, 0, None, event.pushed, event.fetched)),
                *self._more(sender),
            ]
        samples, steps = self._work.samples_of(work_unit), work_unit.portion.count
        effects.append(
            WriteRecord(
                records.Stepped(sender, steps, samples, 1, event.loss / samples, event.pushed, event.fetched, 0, steps)
            )
        )
        if self._may(May.DEAL) and (found := self._work.take()) is not None:
            self._answer, self._waits = found, False
            return effects + self._deal()
        withdrawn = {effect.to for effect in effects if isinstance(effect, Send)} | {sender}
        return effects + [more for role in sorted(withdrawn) for more in self._more(role)]

    def _more(self, role: str) -> list[Effect]:
        return self._work.deal_one(role) if self._may(May.DEAL) and role in self._served else []

    # members

    def _greet(self) -> list[Effect]:
        effects = super()._greet()
        return effects + (self._deal() if self._may(May.DEAL) else [])

    def _greet_one(self, role: str, initialise: bool = False) -> list[Effect]:
        if roles.is_replica(role):
            self._served.add(role)
        return super()._greet_one(role, initialise)

    def _without_replica(self, role: str, reason: str, died: bool) -> list[Effect]:
        self._served.discard(role)
        return super()._without_replica(role, reason, died)

    # checkpoints and the end

    def _save(self) -> list[Effect]:
        if self._may(May.DEAL) and not self._resting:
            self._due = True
            return []
        return super()._save()

    def _finish(self, cause: Cause, reason: str) -> list[Effect]:
        """What a line search was trying out is not the model: go back to where it began."""
        self._work.abandon()
        return [*self._operate((Copy(X0, X),)), *super()._finish(cause, reason)]
