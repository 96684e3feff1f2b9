"""The story of a Sandblaster replica: Algorithm 1.2's ProcessPortion.

It fetches the parameters once for an evaluation, sums the gradients of a bundle's portions, and sends the sum to all shards. What it was dealt of an
evaluation that is over, or what another has done, it drops.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from typing import Any

from distbelief.core import operations
from distbelief.core.effects import Arrival, Batch, Compute, Computed, Effect, Send
from distbelief.core.roles import COORDINATOR
from distbelief.core.settings import Plan
from distbelief.replica.downpour import Downpour, Steps


class Sandblaster(Downpour):
    """One replica; it joins, reaches the shards and leaves as Downpour's does."""

    def _start(self, plan: Plan) -> None:
        super()._start(plan)
        self._assigned: deque[operations.Assign] = deque()
        self._evaluation = 0
        """Of which it holds the parameters."""
        self._newest = 0
        """Of which it has heard."""
        self._owed: set[str] = set()
        self._sent = (0, 0)

    def _train(self) -> Steps:
        """ProcessPortion, bundle after bundle."""
        while (assigned := (yield from self._next_assigned())) is not None:
            if self._evaluation != assigned.evaluation and not (yield from self._fetched_for(assigned.evaluation)):
                continue
            loss = yield from self._gradient(assigned)
            if loss is not None:
                yield from self._contribute(assigned, loss)

    def _next_assigned(self) -> Generator[Effect, Any, operations.Assign | None]:
        while not (self._ending or self._wanted_away):
            if self._assigned:
                return self._assigned.popleft()
            yield from self._wait()
        return None

    def _fetched_for(self, evaluation: int) -> Generator[Effect, Any, bool]:
        """Fetch the parameters of an evaluation; whether it is not over yet."""
        yield from self._request(0, [part for _, part in self._parts], evaluation)
        yield from self._landed()
        if any(self._arrived[role].updates != evaluation for role, _ in self._parts):
            return False
        self._evaluation = evaluation
        self.vectors.swap(0)
        return True

    def _landed(self) -> Steps:
        while self._links.missing:
            yield from self._wait()

    def _gradient(self, assigned: operations.Assign) -> Generator[Effect, Any, float | None]:
        """The sum of a bundle's gradients, left in the slot, each weighted by its samples' share of a portion; returns the sum of the losses."""
        portion, losses = assigned.bundle.portion, []
        for index in range(portion.first, portion.first + portion.count):
            computed: Computed = yield Compute(Batch(portion.epoch, index))
            self.vectors.accrue(0, index == portion.first, computed.samples / self._settings.batch_size)
            losses.append((computed.loss or 0.0) * computed.samples)
        self.vectors.carry_buffers(0)
        return math.fsum(losses) if all(map(math.isfinite, losses)) else math.inf

    def _contribute(self, assigned: operations.Assign, loss: float) -> Steps:
        """Send a bundle to all shards, and report it once it is in the sum at each."""
        evaluation, number = assigned.evaluation, assigned.number
        self._owed, self._sent = {role for role, _ in self._parts}, (evaluation, number)
        for (role, part), payload in zip(self._parts, self._outgoing[0], strict=True):
            message = operations.Contribute(0, part.start, part.stop, self.incarnation, evaluation, number, assigned.bundle.part)
            yield Send(role, message, payload)
        while self._owed:
            yield from self._wait()
        pushed, fetched, self._work.fetched = sum(part.size for _, part in self._parts), self._work.fetched, 0
        yield Send(COORDINATOR, operations.Done(evaluation, number, loss, pushed, fetched))

    def _take(self, arrival: Arrival) -> None:
        event = arrival.event
        if isinstance(event, operations.Assign):
            if event.evaluation > self._newest:
                self._assigned.clear()
                self._newest = event.evaluation
            self._assigned.append(event)
        elif isinstance(event, operations.Withdraw):
            self._assigned = deque(one for one in self._assigned if (one.evaluation, one.number) != (event.evaluation, event.number))
        elif isinstance(event, operations.Contributed):
            if (event.evaluation, event.number) == self._sent and event.incarnation == self.incarnation:
                self._owed.discard(arrival.sender)
        else:
            super()._take(arrival)

    def waits(self) -> str:
        """What it waits for, where it does: one sentence."""
        if self._plan is not None and not self._links.lost and self._owed:
            return "for the shards to take its bundle"
        return super().waits()

    def standing(self) -> dict[str, Any]:
        """Which evaluation it computes for."""
        return {} if self._plan is None else {"clock": self._evaluation}
