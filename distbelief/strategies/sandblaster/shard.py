"""The shard of a job that descends in batches: it sums the work units of an evaluation, each once, and operates on its
slices of named vectors.

A work unit is one gradient, of the same portions at the same parameters whoever computes it. So a shard takes the first
copy that reaches it, by the work unit's number, and ignores the others: it need not ask whether other shards took the
same
copy. What reaches it after the evaluation is over, or was computed before, is ignored too.

With a standby (`DescentStandby`) it tells that of every operation and every work unit that it takes, and the standby
does
the same; what a shard has to say of them it says once the standby has them. Operations are numbered, so the coordinator
may tell the next life what a shard that died was told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distbelief.core import roles
from distbelief.core.conversations import mirroring, operations, pushing
from distbelief.core.effects import Effect, Payload, Send
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.messages import Message, Version
from distbelief.core.protocol import BATCHED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.shard import Shard
from distbelief.server.standby import STATE_LIMIT, Standby
from distbelief.strategies.sandblaster.settings import Descent
from distbelief.strategies.sandblaster.vectors import VectorSlice


class DescentShard(Shard):
    """One server shard.

    Args:
        index: which of the plan's assignments it holds.
        make: makes the slice, once the plan is known.
        incarnation: of this shard.
    """

    heard = heard_by(Kind.SHARD, BATCHED)

    def __init__(self, index: int, make: Callable[[Plan, int], VectorSlice], incarnation: int = 0) -> None:
        super().__init__(index, make, incarnation)
        self._into: tuple[str, ...] = ()
        self._taken: set[int] = set()
        self._ordered = False
        self._next = 0
        self._early: dict[int, tuple[Payload, int]] = {}
        self._newest = operations.Operated(0, ())

    def _take_gradients(self) -> Mapping[type, Callable[..., list[Effect]]]:
        return {operations.Operate: self._operate, operations.Contribute: self._contribute}

    @property
    def vectors(self) -> VectorSlice:
        """Its slice."""
        return self.held  # type: ignore[return-value]  # it was given what makes VectorSlices

    def _operate(self, sender: str, event: operations.Operate, payload: Payload | None) -> list[Effect]:
        asks = any(map(operations.scalars, event.commands))
        if event.number <= self._newest.number:  # told again, for the life before may not have done it
            return (
                self._mirror.after([Send(sender, self._newest)]) if asks and event.number == self._newest.number else []
            )
        scalars: list[float] = []
        floor = self.policy.floor
        for command in event.commands:
            scalars += self._do(command)
        self._newest = answer = operations.Operated(event.number, tuple(scalars))
        life = self.version.incarnation
        told = self._mirror.repeat(
            lambda number, _: mirroring.OperationsDone(life, number, event, answer.scalars), None, self.policy.floor
        )
        told += self._mirror.after([Send(sender, answer)] if asks else [])
        return told + (self._let_go() if self.policy.floor > floor else [])

    def _do(self, command: operations.AnyCommand) -> list[float]:
        if isinstance(command, operations.Gather):
            self._gather(command)
        return self.vectors.operate(command)

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
            raise RemoteProtocolError(
                f"{sender} contributes [{event.start}, {event.stop}) to {self.role}, which does not hold that"
            )
        if (
            event.evaluation > self.policy.floor
            or not 0 <= event.number <= SAMPLES_LIMIT
            or not 0 <= event.part < max(len(self._into), 1)
        ):
            raise RemoteProtocolError(
                f"{sender} contributes work unit {event.number}, part {event.part}, of evaluation {event.evaluation}; "
                f"{self.role} is at"
                f" {self.policy.floor}"
            )
        told: list[Effect] = []
        if event.evaluation == self.policy.floor and event.number not in self._taken:
            told = self._mirror.repeat(self._took(event.number, event.part, payload), payload)
            self.take(event.number, event.part, payload)
        return told + self._mirror.after(
            [Send(sender, operations.Contributed(event.incarnation, event.evaluation, event.number))]
        )

    def _took(self, work_unit: int, part: int, payload: Payload) -> Callable[[int, int], Message]:
        life, size = self.version.incarnation, payload.nbytes
        return lambda number, slot: mirroring.WorkUnitTaken(slot, 0, size, life, number, work_unit, part)

    def take(self, number: int, part: int, payload: Payload) -> None:
        """Add a work unit to its part of the batch; where that is to be in order, keep a copy of what is before its
        time.
        """
        self._taken.add(number)
        if self._ordered and number != self._next:
            self.wait(number, part, payload)
            return
        self.vectors.contribute(payload, self._into[part])
        self._next = number + 1
        while (kept := self._early.pop(self._next, None)) is not None:
            self.vectors.contribute(kept[0], self._into[kept[1]])
            self._next += 1

    def wait(self, number: int, part: int, payload: Payload) -> None:
        """Keep a copy of a work unit until it is its turn."""
        self._early[number] = self.vectors.keep(payload), part

    def _fetch(self, sender: str, event: pushing.Fetch, payload: Payload | None) -> list[Effect]:
        """An evaluator is sent what the last iteration ended with, whatever a line search is trying out now."""
        if sender != roles.EVALUATOR or self._which(sender, event.start, event.stop):
            return super()._fetch(sender, event, payload)
        return [
            Send(sender, pushing.Fetched(event.slot, event.start, event.stop, self.version), self.vectors.accepted())
        ]

    # the standby

    def _begin_mirror(self, sender: str, event: mirroring.BeginMirroring, payload: Payload | None) -> list[Effect]:
        """Send a standby every vector, and how far the sum of the evaluation is."""
        done = self._newest.number, self._newest.scalars
        summing = mirroring.Summing(*done, self._into, self._ordered, tuple(sorted(self._taken)), self._next)
        whole = mirroring.StateSent(
            self.version.incarnation, 0, self.version.updates, 0, {}, (), self.policy.floor, (), summing=summing
        )
        early = [(self._took(number, part, kept), kept) for number, (kept, part) in self._early.items()]
        return self._mirror.begin(event.place, self.vectors.everything(), whole, early)

    def follow(self, whole: mirroring.StateSent) -> None:
        """Be as far as another is."""
        assert whole.summing is not None
        at = whole.summing
        self.policy.floor, self._newest = whole.floor, operations.Operated(at.operation, at.scalars)
        self._into, self._ordered, self._taken, self._next = at.into, at.ordered, set(at.taken), at.next

    def repeat(self, done: mirroring.OperationsDone) -> None:
        """Do what another has done, but for the scalars, which it tells."""
        for command in done.operate.commands:
            if not operations.scalars(command):
                self._do(command)
        self._newest = operations.Operated(done.operate.number, done.scalars)


class DescentStandby(Standby):
    """The standby of a `DescentShard`; its arguments are those of every standby."""

    _shard: DescentShard

    def _take_steps(self) -> Mapping[type, Callable[..., list[Effect]]]:
        return {
            **super()._take_steps(),
            mirroring.OperationsDone: self._did,
            mirroring.WorkUnitTaken: self._take,
        }

    def _born(self) -> DescentShard:
        return DescentShard(self.index, self._make)  # type: ignore[arg-type]  # it was given to this class, and makes VectorSlices

    @property
    def _limit(self) -> int:
        descent = self._plan.settings.own(Descent)
        return 2 * (2 * (descent.history + 1) + STATE_LIMIT)  # of low precision, twice what the slice has

    def _take_whole(self, sender: str, event: mirroring.StateSent, payload: Payload | None) -> list[Effect]:
        if event.summing is None:
            raise RemoteProtocolError(f"{self.role} was sent the state of a shard that does not descend")
        kept = super()._take_whole(sender, event, payload)
        self._shard.follow(event)
        return kept

    def _did(self, sender: str, event: mirroring.OperationsDone, payload: Payload | None) -> list[Effect]:
        if not self._whole:
            raise RemoteProtocolError(f"{self.role} was sent operations before the state that they change")
        self._shard.repeat(event)
        self._floor = self._shard.policy.floor
        return [self._keep(event)]

    def _take(self, sender: str, event: mirroring.WorkUnitTaken, payload: Payload | None) -> list[Effect]:
        plan = self._plan
        wrong = payload is None or payload.nbytes != plan.assignments[self.index].moving.size
        if wrong or not 0 <= event.part < len(plan.settings.own(Descent).parts):
            raise RemoteProtocolError(f"{self.role} was sent a work unit that is none of its shard's: {event}")
        assert payload is not None
        (self._shard.take if self._whole else self._shard.wait)(event.work_unit, event.part, payload)
        return [self._keep(event)]
