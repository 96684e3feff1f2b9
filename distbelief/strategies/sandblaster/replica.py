"""The client of a Sandblaster replica: ProcessPortion of Algorithm 1.2.

It fetches the parameters once for each evaluation, sums the gradients of a work unit's portions, and sends the sum to
all shards. It drops work units of an evaluation that is over, or that another replica has done, also half-way. When a
standby takes a shard's place, it gets again what that shard had not acknowledged. Without standbys, all go back to a
checkpoint, and the replica begins anew.

Each partition of a split replica sends its part of the sum to the shards of its own range. The first one leads: before
each portion it says whether all of them compute it or drop the work unit, and it reports work units once they are in
the sums at all shards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator

from distbelief.core.conversations import dealing, initialising, operations, pushing
from distbelief.core.effects import GLANCE, RECEIVE, Arrival, Batch, Effect, Send, Steps
from distbelief.replica.served_replica import ServedReplica, ServerView
from distbelief.replica.work import WorkQueue, gradient
from distbelief.sharding.layout import Range


class _Sent:
    """A work unit on its way to the shards, with what was sent to those that have not acknowledged it."""

    def __init__(self, assigned: operations.Assign, loss: float, owing: dict[str, Send]) -> None:
        self.assigned, self.loss, self.owing = assigned, loss, owing


class WorkUnitTraining:
    """ProcessPortion, and all that a replica knows since it was welcomed, or since all went back to a checkpoint."""

    def __init__(self, replica: ServedReplica, server: ServerView) -> None:
        self.server, self.work = server, WorkQueue()
        self._replica, self._links, self._vectors = replica, replica.links, replica.vectors
        self._siblings = replica.siblings
        self._assigned: deque[operations.Assign] = deque()
        self._orders: deque[dealing.Deal | operations.Withdraw] = deque()
        """The lead's orders about assigned work units, at a partition that follows."""
        self._parts: dict[tuple[int, int], dict[str, operations.Done]] = {}
        """Partitions that have done each work unit, by evaluation and number, at the lead."""
        self._newest = 0
        """Number of the newest evaluation that it knows."""
        self._computing: operations.Assign | None = None
        """Work unit that it computes; None once the result is not needed."""
        self._evaluation = 0
        """Number of the evaluation whose parameters it holds."""
        self._settings = server.plan.settings
        self._slot = 0
        self._sent: list[_Sent | None] = [None] * server.slots

    @property
    def clock(self) -> int:
        """The evaluation for which the replica computes now."""
        return self._evaluation

    def train(self) -> Steps[None]:
        """Compute work units, each while the one before is on its way to the shards."""
        yield from self._fetch(self.server.whole)
        self._vectors.swap(0)
        while (assigned := (yield from self._next_assigned())) is not None:
            if self._evaluation != assigned.evaluation and not (yield from self._fetched_for(assigned.evaluation)):
                continue
            while self._sent[self._slot]:
                yield from self.wait()
            loss = yield from self._gradient(assigned)
            if loss is not None:
                yield from self._contribute(assigned, loss)

    def _next_assigned(self) -> Steps[operations.Assign | None]:
        """Return the next work unit, and tell the followers; None where there are no more."""
        while not (self._replica.ending or self._replica.wanted_away) or (self._siblings.follows and self._assigned):
            if self._assigned:
                assigned = self._assigned.popleft()
                yield from self._siblings.tell(assigned)
                return assigned
            yield from self.wait()
        return None

    def _fetched_for(self, evaluation: int) -> Steps[bool]:
        """Fetch the parameters of an evaluation; return whether all partitions have them, and it is not over."""
        yield from self._fetch(self.server.moving, evaluation)
        here = max((self.server.held.arrived(role).updates for role, _ in self.server.parts), default=evaluation)
        newest, _ = yield from self._siblings.agree(here, self.wait)
        if newest != evaluation:
            return False
        self._evaluation = evaluation
        self._vectors.swap(0)
        return True

    def _fetch(self, parts: list[Range], evaluation: int = 0) -> Steps[None]:
        yield from self.server.fetch(0, parts, evaluation)
        while self._links.missing:
            yield from self.wait()

    def _gradient(self, assigned: operations.Assign) -> Steps[float | None]:
        """Sum a work unit's gradients in the slot, weighted by the portions' samples; return the sum of the losses.

        Return None if the work unit was dropped.
        """
        portion, losses = assigned.work_unit.portion, []
        self._computing = assigned if assigned.evaluation >= self._newest else None
        for index in range(portion.first, portion.first + portion.count):
            if not (yield from self._may_compute(assigned, index)):
                return None
            computed = yield from gradient(self._replica.split, Batch(portion.epoch, index), self.wait)
            assert computed is not None  # only a script's loop can end before its data do
            yield from self._look()
            if self._computing is None and self._replica.split is None:
                return None
            self._vectors.accrue(self._slot, index == portion.first, computed.samples / self._settings.batch_size)
            losses.append((computed.loss or 0.0) * computed.samples)
        self._vectors.carry_buffers(self._slot)
        return math.fsum(losses) if all(map(math.isfinite, losses)) else math.inf

    def _may_compute(self, assigned: operations.Assign, index: int) -> Generator[Effect, object, bool]:
        """Return whether to compute a portion. The lead decides, before each but not after the last, for all
        partitions: so all of them send the work unit, or none does.
        """
        if self._siblings.follows:
            while not self._orders:
                yield from self.wait()
            return isinstance(self._orders.popleft(), dealing.Deal)
        if self._computing is None or self._replica.ending:
            yield from self._siblings.tell(operations.Withdraw(assigned.evaluation, assigned.number))
            return False
        yield from self._siblings.deal(Batch(assigned.work_unit.portion.epoch, index))
        return True

    def _contribute(self, assigned: operations.Assign, loss: float) -> Steps[None]:
        """Send a work unit to all shards, without waiting for them."""
        slot = self._slot
        named = self._replica.incarnation, assigned.evaluation, assigned.number, assigned.work_unit.part
        sends = {
            role: Send(role, operations.Contribute(slot, part.start, part.stop, *named), payload)
            for (role, part), payload in zip(self.server.parts, self.server.models[0].outgoing[slot], strict=True)
        }
        self._sent[slot] = _Sent(assigned, loss, sends)
        yield from list(sends.values())
        self._slot = (slot + 1) % self.server.slots

    # events

    def wait(self) -> Steps[None]:
        self.take((yield RECEIVE))
        yield from self._answer()

    def _look(self) -> Steps[None]:
        """Take all that has arrived, without waiting."""
        # a welcome begins the next training: events that arrive after it are for that training
        while self._replica.welcome is None and (arrival := (yield GLANCE)) is not None:
            self.take(arrival)
        yield from self._answer()

    def _answer(self) -> Steps[None]:
        """Do what the events that were taken ask for."""
        if self._replica.welcome is not None:
            yield from self._replica.reunite(self, self._replica.welcome)
        yield from self._links.seek()
        yield from self._siblings.relayed()
        yield from self._report()

    def owed(self, shard: str) -> Steps[None]:
        yield from [sent.owing[shard] for sent in self._sent if sent and shard in sent.owing]

    def _report(self) -> Steps[None]:
        """Report work units that are in the sums at all shards."""
        for slot, sent in enumerate(self._sent):
            if sent is None or sent.owing:
                continue
            named = sent.assigned.evaluation, sent.assigned.number
            parts = self._parts.get(named, {})
            if len(parts) < len(self._siblings.followers):
                continue
            self._parts.pop(named, None)
            self._sent[slot] = None
            loss = sent.loss + sum(part.loss for part in parts.values())  # only one partition knows the loss
            yield Send(self._replica.superior, operations.Done(*named, loss))

    def take(self, arrival: Arrival) -> None:
        event = arrival.event
        if isinstance(event, operations.Assign | operations.Withdraw | dealing.Deal) and self._siblings.follows:
            self._take_of_lead(event)
        elif isinstance(event, operations.Assign | operations.Withdraw):
            self._take_of_coordinator(event)
        elif isinstance(event, operations.Done) and arrival.sender in self._siblings.followers:
            self._parts.setdefault((event.evaluation, event.number), {})[arrival.sender] = event
        elif isinstance(event, operations.Contributed):
            named = event.evaluation, event.number
            for sent in self._sent if event.incarnation == self._replica.incarnation else ():
                if sent and (sent.assigned.evaluation, sent.assigned.number) == named:
                    sent.owing.pop(arrival.sender, None)
        elif isinstance(event, pushing.Fetched | initialising.Initialised):
            if self._links.answered(arrival.sender, event) and isinstance(event, pushing.Fetched):
                self.server.held.arrive(arrival.sender, event)
        else:
            self._replica.take(arrival)

    def _take_of_coordinator(self, event: operations.Assign | operations.Withdraw) -> None:
        if isinstance(event, operations.Assign):
            if event.evaluation > self._newest:
                self._assigned.clear()
                self._newest, self._computing = event.evaluation, None
            self._assigned.append(event)
            return
        named = event.evaluation, event.number
        self._assigned = deque(unit for unit in self._assigned if (unit.evaluation, unit.number) != named)
        if self._computing and (self._computing.evaluation, self._computing.number) == named:
            self._computing = None

    def _take_of_lead(self, event: operations.Assign | operations.Withdraw | dealing.Deal) -> None:
        if isinstance(event, operations.Assign):
            self._assigned.append(event)
        else:
            self._orders.append(event)

    def waits(self) -> str:
        sent = [unit for unit in self._sent if unit]
        if any(unit.owing for unit in sent):
            return "for the shards to take its work unit"
        parts = [self._parts.get((unit.assigned.evaluation, unit.assigned.number), {}) for unit in sent]
        if late := [role for role in self._siblings.followers if any(role not in done for done in parts)]:
            return f"for the shards to take the parts of {', '.join(late)} of its work unit"
        return self._links.waits_for_answers() or (
            f"for work from {self._replica.superior if self._siblings.follows else 'the coordinator'}"
        )
