"""Evaluations of a batch method: the work units of each, which of them are done, and the sum of their losses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from distbelief.coordination.dealing import DataDealer
from distbelief.core import roles
from distbelief.core.conversations import operations
from distbelief.core.effects import Effect, Send
from distbelief.core.portions import Position, WorkUnit
from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.strategies.sandblaster.batches import BatchWindows
from distbelief.strategies.sandblaster.settings import Descent
from distbelief.strategies.sandblaster.stories import LossSum
from distbelief.strategies.sandblaster.work_units import WorkUnits


class Evaluating(DataDealer):
    """Dealer of one evaluation after another, in work units.

    Args:
        plan: the job's.
        position: where the job goes on.
        samples: number of samples that were computed before.
        evaluation: number of the last evaluation before this dealer; numbers only grow.
    """

    units = "portions"

    def __init__(self, plan: Plan, position: Position, samples: int, evaluation: int = 0) -> None:
        self.descent = plan.settings.own(Descent)
        self._size, self._all = plan.settings.batch_size, plan.samples
        self.epochs, self.state = position.epoch, dict(position.state)
        self.samples, self.pushes, self.minibatches = samples, 0, 0
        self.evaluation = max(evaluation, int(self.state.pop("evaluations", 0)))
        self.again = 0
        """Work units that were dealt a second time, since this was last reset."""
        self._iterations = plan.settings.epochs
        self._batches = BatchWindows(self.descent, plan.samples, self._size)
        self._cut: list[WorkUnit] = []
        self._work_units: WorkUnits | None = None
        self._losses: dict[int, float] = {}

    @property
    def finished(self) -> bool:
        """True if all iterations are done."""
        return self.epochs >= self._iterations

    def position(self) -> Position:
        """Return the position after the last iteration, for a checkpoint."""
        return Position(self.epochs, 0, (), {**self.state, "evaluations": self.evaluation})

    def advance(self, iteration: int, state: Json) -> None:
        """Note the end of an iteration."""
        self.epochs, self.state = iteration, state

    def begin(self, batch: int, members: Iterable[str]) -> operations.Gather:
        """Begin the next evaluation, on a batch; return the command for the shards."""
        self.evaluation += 1
        self._cut, self._losses = self._batches.work_units(batch), {}
        self._work_units = WorkUnits(len(self._cut), sorted(members, key=roles.index_of), self.descent.backup_portions)
        return operations.Gather(self.evaluation, self.descent.sums, self.descent.deterministic)

    def abandon(self) -> None:
        """Drop the evaluation that is under way."""
        self._work_units = None

    def deal(self, members: Collection[str], withheld: bool = False) -> list[Effect]:
        """Deal work units to replicas with room for them: one to each, then others in reserve."""
        effects: list[Effect] = []
        if self._work_units is None or withheld:
            return effects
        waiting = sorted(members, key=lambda role: (self.held(role), roles.index_of(role)))
        while waiting:
            served = []
            for role in waiting:
                if (number := self._work_units.deal(role)) is not None:
                    effects.append(Send(role, operations.Assign(self.evaluation, number, self._cut[number])))
                    served.append(role)
            waiting = served
        return effects

    def done(self, sender: str, event: operations.Done) -> tuple[WorkUnit | None, list[Effect]]:
        """Take a report; return the work unit if this is its first, and messages to others that hold it.

        Raises:
            RemoteProtocolError: there is no such work unit or evaluation.
        """
        if event.evaluation > self.evaluation or (
            event.evaluation == self.evaluation and not 0 <= event.number < len(self._cut)
        ):
            raise RemoteProtocolError(
                f"{sender} reports work unit {event.number} of evaluation {event.evaluation}, which does not exist"
            )
        if (
            self._work_units is None
            or event.evaluation < self.evaluation
            or not self._work_units.done(event.number, sender)
        ):
            return None, []
        others = self._work_units.withdraw(event.number)
        work_unit = self._cut[event.number]
        self._losses[event.number] = event.loss if math.isfinite(event.loss) else math.inf
        self.samples += self.samples_of(work_unit)
        self.pushes += 1
        return work_unit, [Send(role, operations.Withdraw(event.evaluation, event.number)) for role in others]

    def samples_of(self, work_unit: WorkUnit) -> int:
        """Return the number of samples in a work unit; the last portion of a pass may be smaller."""
        first, count = work_unit.portion.first, work_unit.portion.count
        return min((first + count) * self._size, self._all) - first * self._size

    def take(self) -> LossSum | None:
        """Return the sum of the evaluation once all its work units are done, else None."""
        if self._work_units is None or self._work_units.left:
            return None
        self.again += self._work_units.again
        self._work_units = None
        parts = [0] * len(self.descent.sums)
        for work_unit in self._cut:
            parts[work_unit.part] += self.samples_of(work_unit)
        loss = math.fsum(self._losses.values())  # exact, so that the order of reports does not matter
        return LossSum(loss, sum(parts), tuple(samples / self._size for samples in parts))

    def held(self, role: str) -> int:
        """Return how many portions a replica holds."""
        return sum(self._cut[number].portion.count for number in self._work_units.held(role)) if self._work_units else 0

    def lost(self, role: str) -> int:
        """Take back what a replica holds, as it is gone; return the number of portions."""
        held = self.held(role)
        if self._work_units is not None:
            self._work_units.lost(role)
        return held

    def validate(self, members: Collection[str]) -> None:
        """Assert that each work unit of an evaluation is either done or left."""
        if self._work_units is not None:
            left, done = self._work_units.left, len(self._losses)
            assert left + done == len(self._cut), f"{left} work units are left, {done} done of {len(self._cut)}"
