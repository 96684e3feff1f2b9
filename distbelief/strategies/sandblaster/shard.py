"""A shard of batch methods: it sums each evaluation's work units, and operates on slices of named vectors.

A work unit has the same gradient on every replica. A shard takes the first copy that arrives and ignores others, so
that shards need not agree on whose copy counts. It ignores work units of earlier evaluations as well.

A standby gets each operation and each work unit that its shard takes, and does the same. The shard answers once its
standby has them. Operations are numbered, so that the coordinator may send a restarted shard those that the last life
was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch

from distbelief.core.conversations import mirroring, operations
from distbelief.core.conversations.table import Conversation
from distbelief.core.effects import Effect, Payload, Send
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.messages import Message, Version
from distbelief.core.protocol import BATCHED
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.machine import Handlers
from distbelief.server.mirror import Make
from distbelief.server.shard import Shard
from distbelief.server.standby import STATE_LIMIT
from distbelief.strategies.sandblaster.settings import Descent
from distbelief.strategies.sandblaster.vectors import VectorSlice


class WorkUnitSums:
    """Sum of an evaluation's work units, and operations on vectors."""

    conversations: Iterable[Conversation] = BATCHED
    repeated: tuple[type, ...] = (mirroring.OperationsDone, mirroring.WorkUnitTaken)

    def __init__(self) -> None:
        self._into: tuple[str, ...] = ()
        self._taken: set[int] = set()
        self._ordered = False
        self._next = 0
        self._early: dict[int, tuple[Payload, int]] = {}
        self._newest = operations.Operated(0, ())

    def handlers(self, shard: Shard) -> Handlers:
        return {
            operations.Operate: partial(self._operate, shard),
            operations.Contribute: partial(self._contribute, shard),
        }

    def measured(self, shard: Shard) -> Payload:
        """Return the parameters after the last iteration, not those that a line search tries."""
        return _vectors(shard).accepted()

    def _operate(self, shard: Shard, sender: str, event: operations.Operate, payload: Payload | None) -> list[Effect]:
        answers, mirror = any(map(operations.scalars, event.commands)), shard.mirror
        if event.number <= self._newest.number:  # repeated, in case the incarnation before lacked it
            return mirror.after([Send(sender, self._newest)]) if answers and event.number == self._newest.number else []
        scalars: list[float] = []
        floor = shard.policy.floor
        for command in event.commands:
            scalars += self._do(shard, command)
        self._newest = answer = operations.Operated(event.number, tuple(scalars))
        incarnation = shard.version.incarnation
        effects = mirror.repeat(
            lambda number, _: mirroring.OperationsDone(incarnation, number, event, answer.scalars),
            None,
            shard.policy.floor,
        )
        effects += mirror.after([Send(sender, answer)] if answers else [])
        return effects + (shard.let_go() if shard.policy.floor > floor else [])

    def _do(self, shard: Shard, command: operations.AnyCommand) -> list[float]:
        if isinstance(command, operations.Gather):
            self._gather(shard, command)
        return _vectors(shard).operate(command)

    def _gather(self, shard: Shard, command: operations.Gather) -> None:
        """Begin the sum of an evaluation."""
        if command.evaluation <= shard.policy.floor:
            raise RemoteProtocolError(f"evaluation {command.evaluation} is to begin after {shard.policy.floor}")
        shard.policy.floor = command.evaluation
        shard.version = Version(shard.version.incarnation, command.evaluation)
        self._into, self._ordered = command.into, command.ordered
        self._taken, self._early, self._next = set(), {}, 0

    def _contribute(
        self, shard: Shard, sender: str, event: operations.Contribute, payload: Payload | None
    ) -> list[Effect]:
        moving, floor = shard.own.moving, shard.policy.floor
        if event.start != moving.start or event.stop != moving.stop or payload is None:
            raise RemoteProtocolError(
                f"{sender} contributes [{event.start}, {event.stop}) to {shard.role}, which does not hold that"
            )
        if (
            event.evaluation > floor
            or not 0 <= event.number <= SAMPLES_LIMIT
            or not 0 <= event.part < max(len(self._into), 1)
        ):
            raise RemoteProtocolError(
                f"{sender} contributes work unit {event.number}, part {event.part}, of evaluation {event.evaluation}; "
                f"{shard.role} is at {floor}"
            )
        effects: list[Effect] = []
        if event.evaluation == floor and event.number not in self._taken:
            effects = shard.mirror.repeat(_took(shard, event.number, event.part, payload), payload)
            self._take(shard, event.number, event.part, payload)
        return effects + shard.mirror.after(
            [Send(sender, operations.Contributed(event.incarnation, event.evaluation, event.number))]
        )

    def _take(self, shard: Shard, number: int, part: int, payload: Payload) -> None:
        """Add a work unit to its part of the batch; if they go in order, keep a copy until its turn."""
        vectors = _vectors(shard)
        self._taken.add(number)
        if self._ordered and number != self._next:
            self._wait(shard, number, part, payload)
            return
        vectors.contribute(payload, self._into[part])
        self._next = number + 1
        while (kept := self._early.pop(self._next, None)) is not None:
            vectors.contribute(kept[0], self._into[kept[1]])
            self._next += 1

    def _wait(self, shard: Shard, number: int, part: int, payload: Payload) -> None:
        """Keep a copy of a work unit until its turn."""
        self._early[number] = _vectors(shard).keep(payload), part

    # the standby

    def state(self, shard: Shard) -> tuple[dict[str, torch.Tensor], mirroring.Summing, list[tuple[Make, Payload]]]:
        done = self._newest.number, self._newest.scalars
        summing = mirroring.Summing(*done, self._into, self._ordered, tuple(sorted(self._taken)), self._next)
        early = [(_took(shard, number, part, kept), kept) for number, (kept, part) in self._early.items()]
        return _vectors(shard).everything(), summing, early

    def state_limit(self, plan: Plan) -> int:
        """Return twice the vectors of history and optimizer, in slices: for low precision, a vector is two slices."""
        return 2 * (2 * (plan.settings.own(Descent).history + 1) + STATE_LIMIT)

    def follow(self, shard: Shard, whole: mirroring.StateSent) -> None:
        if whole.summing is None:
            raise RemoteProtocolError(f"the standby of {shard.role} was sent the state of another kind of shard")
        at = whole.summing
        shard.policy.floor, self._newest = whole.floor, operations.Operated(at.operation, at.scalars)
        self._into, self._ordered, self._taken, self._next = at.into, at.ordered, set(at.taken), at.next

    def repeat(
        self,
        shard: Shard,
        whole: bool,
        event: mirroring.OperationsDone | mirroring.WorkUnitTaken,
        payload: Payload | None,
    ) -> None:
        """Repeat an operation, with the scalars of the shard, or take a work unit."""
        if isinstance(event, mirroring.OperationsDone):
            if not whole:
                raise RemoteProtocolError(f"{shard.role} sent its standby operations before the state that they change")
            for command in event.operate.commands:
                if not operations.scalars(command):
                    self._do(shard, command)
            self._newest = operations.Operated(event.operate.number, event.scalars)
            return
        parts = shard.own.plan.settings.own(Descent).sums
        if payload is None or payload.nbytes != shard.own.moving.size or not 0 <= event.part < len(parts):
            raise RemoteProtocolError(f"{shard.role} sent its standby a work unit that is none of its own: {event}")
        (self._take if whole else self._wait)(shard, event.work_unit, event.part, payload)


def _vectors(shard: Shard) -> VectorSlice:
    return cast(VectorSlice, shard.held)  # the shard's `make` builds a `VectorSlice`


def _took(shard: Shard, work_unit: int, part: int, payload: Payload) -> Callable[[int, int], Message]:
    incarnation, size = shard.version.incarnation, payload.nbytes
    return lambda number, slot: mirroring.WorkUnitTaken(slot, 0, size, incarnation, number, work_unit, part)
