"""Evaluations of a batch method: batches of the training set, their work units, and the sum of the losses.

Work units are dealt so that slow and dead replicas delay nobody, and that each counts once. A replica has a run of
consecutive work units, the same in every evaluation, and is dealt them in order, some in reserve. When its run is empty
it takes half of the longest run that is left. Once all are dealt, idle replicas get copies of work units that are not
done: the first result counts. A dead replica's work units are dealt again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable

from distbelief.coordination.dealing import DataDealer
from distbelief.core import roles
from distbelief.core.conversations import operations
from distbelief.core.effects import Effect, Send
from distbelief.core.portions import Portion, Position, WorkUnit
from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError, UsageError
from distbelief.strategies.sandblaster.settings import Descent
from distbelief.strategies.sandblaster.stories import LossSum

RESERVE = 3
"""Most work units that a replica holds: one on its way to the shards, the current one, and the next. Near the end it is
fewer, so that no work unit lies in reserve while another replica is idle.
"""


class WorkUnits:
    """Dealer of work units 0 to `count - 1` of one evaluation.

    Args:
        count: number of work units.
        members: the replicas, always in the same order.
        copies: number of other replicas that may be dealt the same work unit.

    >>> work_units = WorkUnits(2, ["replica 0", "replica 1"], copies=1)
    >>> work_units.deal("replica 0"), work_units.deal("replica 1"), work_units.deal("replica 0")
    (0, 1, None)
    >>> work_units.done(0, "replica 0"), work_units.deal("replica 0")
    (True, 1)
    >>> work_units.done(1, "replica 0"), work_units.done(1, "replica 1")
    (True, False)
    """

    def __init__(self, count: int, members: Iterable[str], copies: int) -> None:
        self.left = count
        """Number of work units that are not done."""
        self.again = 0
        """Number of copies that were dealt."""
        self._copies, self._fresh_left = copies, count
        self._done = bytearray(count)
        members = list(members)
        edges = [count * i // max(len(members), 1) for i in range(len(members) + 1)]
        self._runs = {who: (edges[i], edges[i + 1]) for i, who in enumerate(members)}
        self._unheld: deque[int] = deque(range(0 if members else count))
        self._held: dict[str, list[int]] = {}
        self._holders: dict[int, list[str]] = {}
        self._open: deque[int] = deque()  # work units that are dealt, and may be dealt again, as copies

    def deal(self, who: str) -> int | None:
        """Return the next work unit for a replica; None where it has enough, or there is none."""
        held = self._held.setdefault(who, [])
        if len(held) > min(RESERVE - 1, self._fresh_left // len(self._held)):
            return None
        number = self._fresh(who)
        if number is None and not held:
            number = self._copy(who)
        if number is not None:
            held.append(number)
            self._holders.setdefault(number, []).append(who)
        return number

    def _fresh(self, who: str) -> int | None:
        """Return a work unit that nobody holds."""
        while self._unheld:
            if not self._done[number := self._unheld.popleft()]:
                return self._begin(number)
        first, stop = self._runs.get(who, (0, 0))
        if first == stop and self._runs:
            longest = max(self._runs, key=lambda other: self._runs[other][1] - self._runs[other][0])
            start, end = self._runs[longest]
            if start == end:
                self._runs.clear()
                return None
            first, stop = (start + end) // 2, end
            self._runs[longest] = start, first
        if first == stop:
            return None
        self._runs[who] = first + 1, stop
        return self._begin(first)

    def _begin(self, number: int) -> int:
        """Note that a work unit is dealt for the first time."""
        self._open.append(number)
        self._fresh_left -= 1
        return number

    def _copy(self, who: str) -> int | None:
        """Return a work unit that another replica holds, the one that was dealt first."""
        for _ in range(len(self._open)):
            number = self._open.popleft()
            holders = self._holders.get(number, [])
            if self._done[number] or len(holders) > self._copies:
                continue
            self._open.append(number)
            if who not in holders:
                self.again += 1
                return number
        return None

    def done(self, number: int, who: str) -> bool:
        """Note that a replica has done a work unit; return whether it is the first to do so."""
        if who in (holders := self._holders.get(number, [])):
            holders.remove(who)
            self._held[who].remove(number)
        if self._done[number]:
            return False
        self._done[number] = 1
        self.left -= 1
        return True

    def withdraw(self, number: int) -> list[str]:
        """Take a work unit that is done from its other holders; return these."""
        holders = self._holders.pop(number, [])
        for who in holders:
            self._held[who].remove(number)
        return holders

    def lost(self, who: str) -> int:
        """Take back the work units of a dead replica; return how many nobody else holds."""
        again = 0
        for number in self._held.pop(who, []):
            self._holders[number].remove(who)
            if not self._done[number] and not self._holders[number]:
                self._unheld.append(number)
                self._fresh_left += 1
                again += 1
            else:
                self._open.append(number)  # another replica may take the dead one's place
        if (run := self._runs.pop(who, None)) is not None:
            self._unheld.extend(range(*run))
        return again

    def held(self, who: str) -> list[int]:
        """Return the work units that a replica holds."""
        return self._held.get(who, [])


class BatchWindows:
    """The batches of a job: each is the whole training set, or a window that moves over it, pass after pass.

    Each pass shuffles the training set by the seed, and cuts it into portions. Consecutive windows overlap.

    Args:
        descent: the job's.
        samples: number of samples in the training set.
        portion_size: samples in a portion; the last of a pass may be smaller.

    >>> batches = BatchWindows(Descent(send_every=2), samples=50, portion_size=10)
    >>> [(work_unit.portion.first, work_unit.portion.count) for work_unit in batches.work_units(7)]
    [(0, 2), (2, 2), (4, 1)]
    >>> windows = BatchWindows(Descent(batch_size=40, overlap=0.25, send_every=2), samples=50, portion_size=10)
    >>> [(b.portion.epoch, b.portion.first, b.portion.count, b.part) for b in windows.work_units(1)]
    [(0, 3, 1, 0), (0, 4, 1, 1), (1, 0, 1, 1), (1, 1, 1, 2)]
    """

    def __init__(self, descent: Descent, samples: int, portion_size: int) -> None:
        self._each = descent.send_every
        self.portions = -(-samples // portion_size)
        self._size = min(self.portions, -(-descent.batch_size // portion_size)) if descent.batch_size else 0
        self._shared = max(1, round(self._size * descent.overlap)) if self._size else 0
        if self._size and self._size < 2 * self._shared + 1:
            raise UsageError(
                f"--batch-size {descent.batch_size} is {self._size} portions of {portion_size} (--portion-size); "
                f"{self._shared} are shared with the batch before it, and as many with the next one: "
                "it needs at least one more"
            )

    def work_units(self, batch: int) -> list[WorkUnit]:
        """Return the work units of a batch, in order; the same at each call."""
        if not self._size:  # every batch is the whole training set
            return self._cut(0, self.portions, 0)
        first = batch * (self._size - self._shared)
        edges = (first, first + self._shared, first + self._size - self._shared, first + self._size)
        return [work_unit for part in range(3) for work_unit in self._cut(edges[part], edges[part + 1], part)]

    def _cut(self, start: int, stop: int, part: int) -> list[WorkUnit]:
        """Return portions `start` to `stop`, counted over all passes, as work units that each lie in one pass."""
        cut = []
        while start < stop:
            epoch, first = divmod(start, self.portions)
            count = min(self._each, stop - start, self.portions - first)
            cut.append(WorkUnit(Portion(epoch, first, count), part))
            start += count
        return cut


class Evaluating(DataDealer):
    """Dealer of one evaluation after another, in work units.

    Args:
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
        return self.epochs >= self._iterations

    def position(self) -> Position:
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

    def deal(self, members: Collection[str]) -> list[Effect]:
        """Deal work units to replicas with room for them: one to each, then others in reserve."""
        effects: list[Effect] = []
        if self._work_units is None:
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
        """Take a report; return the work unit if this is its first, and messages to others that hold it."""
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
        return sum(self._cut[number].portion.count for number in self._work_units.held(role)) if self._work_units else 0

    def lost(self, role: str) -> int:
        held = self.held(role)
        if self._work_units is not None:
            self._work_units.lost(role)
        return held

    def validate(self, members: Collection[str]) -> None:
        if self._work_units is not None:
            left, done = self._work_units.left, len(self._losses)
            assert left + done == len(self._cut), f"{left} work units are left, {done} done of {len(self._cut)}"
