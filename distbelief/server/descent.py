"""The shard of a job that descends in batches: it sums the bundles of an evaluation, each once, and operates on its slices of named vectors.

A bundle is one gradient, of the same portions at the same parameters whoever computes it. So a shard takes the first copy that reaches it, by the
bundle's number, and ignores the others: it need not ask whether other shards took the same copy. What reaches it after the evaluation is over,
or was computed before, is ignored too.
"""

from __future__ import annotations

from collections.abc import Callable

from distbelief.core import messages, operations, roles
from distbelief.core.effects import Effect, Payload, Send
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.messages import Version
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.shard import Shard
from distbelief.server.vectors import VectorSlice


class DescentShard(Shard):
    """One server shard.

    Args:
        index: which of the plan's assignments it holds.
        make: makes the slice, once the plan is known.
        incarnation: of this shard.
    """

    def __init__(self, index: int, make: Callable[[Plan, int], VectorSlice], incarnation: int = 0) -> None:
        super().__init__(index, make, incarnation)
        self._into: tuple[str, ...] = ()
        self._taken: set[int] = set()
        self._ordered = False
        self._early: dict[int, tuple[Payload, str]] = {}
        del self._answers.by_kind[messages.Push]
        self._answers.by_kind |= {operations.Operate: self._operate, operations.Contribute: self._contribute}

    @property
    def vectors(self) -> VectorSlice:
        """Its slice."""
        return self.held  # type: ignore[return-value]

    def _operate(self, sender: str, event: operations.Operate, payload: Payload | None) -> list[Effect]:
        scalars: list[float] = []
        asked, freed = False, False
        for command in event.commands:
            scalars += self.vectors.operate(command)
            asked |= bool(operations.scalars(command))
            if isinstance(command, operations.Gather):
                self._gather(command)
                freed = True
        effects: list[Effect] = [Send(sender, operations.Operated(event.number, tuple(scalars)))] if asked else []
        return effects + (self._let_go() if freed else [])

    def _gather(self, command: operations.Gather) -> None:
        """Begin an evaluation."""
        if command.evaluation <= self.policy.floor:
            raise RemoteProtocolError(f"evaluation {command.evaluation} is to begin after {self.policy.floor}")
        self.policy.floor = command.evaluation
        self.version = Version(self.version.incarnation, command.evaluation)
        self._into, self._ordered = command.into, command.ordered
        self._taken, self._early, self._next = set(), {}, 0

    def _contribute(self, sender: str, event: operations.Contribute, payload: Payload | None) -> list[Effect]:
        own = self._range if self._slice else None
        if own is None or event.start != own.start or event.stop != own.stop or payload is None:
            raise RemoteProtocolError(f"{sender} contributes [{event.start}, {event.stop}) to shard {self.index}, which does not hold that")
        if event.evaluation > self.policy.floor or not 0 <= event.number <= SAMPLES_LIMIT or not 0 <= event.part < max(len(self._into), 1):
            raise RemoteProtocolError(
                f"{sender} contributes bundle {event.number}, part {event.part}, of evaluation {event.evaluation}; shard {self.index} is at"
                f" {self.policy.floor}"
            )
        if event.evaluation == self.policy.floor and event.number not in self._taken:
            self._taken.add(event.number)
            self._sum(event, payload)
        return [Send(sender, operations.Contributed(event.incarnation, event.evaluation, event.number))]

    def _sum(self, event: operations.Contribute, payload: Payload) -> None:
        """Add a bundle to its part of the batch; where that is to be in order, keep a copy of what is before its time."""
        into = self._into[event.part]
        if self._ordered and event.number != self._next:
            self._early[event.number] = self.vectors.keep(payload), into
            return
        self.vectors.contribute(payload, into)
        self._next = event.number + 1
        while (kept := self._early.pop(self._next, None)) is not None:
            self.vectors.contribute(*kept)
            self._next += 1

    def _fetch(self, sender: str, event: messages.Fetch, payload: Payload | None) -> list[Effect]:
        """An evaluator is sent what the last iteration ended with, whatever a line search is trying out now."""
        if sender != roles.EVALUATOR or self._which(sender, event.start, event.stop):
            return super()._fetch(sender, event, payload)
        return [Send(sender, messages.Fetched(event.slot, event.start, event.stop, self.version), self.vectors.accepted())]
