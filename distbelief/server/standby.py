"""The standby: the machine that holds all that its shard has acknowledged, and takes its place when the coordinator
says so.

It makes the same optimizer steps, in the same order, and confirms each. It decides nothing: what is applied, gathered
or dropped is the shard's word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from distbelief.core import events, roles
from distbelief.core.conversations import agreement, membership, mirroring
from distbelief.core.effects import Become, Effect, End, Payload, Send
from distbelief.core.events import Event
from distbelief.core.messages import Bulk, Version
from distbelief.core.norms import KEPT
from distbelief.core.protocol import SERVED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.rounds import History
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.machine import Answers
from distbelief.server.packing import Unpacking
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice

STATE_LIMIT = 16
"""Most bytes of a shard's state, for each byte of its slice, with `STATE_LEAST` beside; one that descends has its
vectors more.
"""
STATE_LEAST = 1 << 16


class Standby:
    """The standby of one shard.

    Args:
        index: of the shard.
        make: makes its slice, once the plan is known.
        incarnation: of this standby.
    """

    heard = heard_by(Kind.STANDBY, SERVED)

    def __init__(self, index: int, make: Callable[[Plan, int], Slice], incarnation: int = 0) -> None:
        self.index, self.incarnation, self._make = index, incarnation, make
        self.role, self._of = roles.standby(index), roles.shard(index)
        self._life = -1
        self._whole = False
        self._answers = Answers(
            self.role,
            self.heard,
            {
                mirroring.Stand: self._stand,
                mirroring.StatePart: self._piece,
                mirroring.StateSent: self._take_whole,
                mirroring.Succeed: self._succeed,
                membership.Stop: lambda _sender, event, _payload: [End(event.reason)],
                events.Lost: lambda sender, _event, _payload: (
                    [End("the coordinator is gone")] if sender == roles.COORDINATOR else []
                ),
                **self._take_steps(),
            },
        )

    def _take_steps(self) -> Mapping[type, Callable[..., list[Effect]]]:
        """How it does what its shard has done."""
        return {mirroring.Copied: self._copy, mirroring.Decided: self._told}

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event; who breaks the protocol is told so by a `RemoteProtocolError`."""
        if roles.kind(sender) is roles.Kind.SHARD and sender != self._of:
            raise RemoteProtocolError(f"{self.role} is none of {sender}'s")
        answer = self._answers.to(sender, type(event))
        if isinstance(event, mirroring.Numbered) and event.life != self._life:
            return []  # on its way since a life that is gone
        effects: list[Effect] = answer(sender, event, payload)
        return effects

    def waits(self) -> str:
        """What it waits for, in one sentence."""
        return "" if self._whole else "to be sent what its shard holds"

    def standing(self) -> dict[str, object]:
        """What it has applied."""
        return {"version": self._shard.version.updates} if self._whole else {}

    def _stand(self, sender: str, event: mirroring.Stand, payload: Payload | None) -> list[Effect]:
        """Begin with nothing; whatever life of the shard it followed before."""
        self._life, self._whole, self._plan = event.life, False, event.plan
        self._shard = self._born()
        held = self._shard.hold(event.plan)
        own = event.plan.assignments[self.index]
        self._state = Unpacking(STATE_LEAST + self._limit * (own.moving.size + own.frozen.size))
        self._held, self._history, self._floor = held, History(), 0
        self._gathered = self._gathered_samples = 0
        self._norms: deque[agreement.Norms] = deque(maxlen=KEPT)
        return [Send(roles.COORDINATOR, mirroring.Stands(event.life))]

    def _born(self) -> Shard:
        """The shard that it may be."""
        return Shard(self.index, self._make)

    @property
    def _limit(self) -> int:
        """Most bytes of a shard's state, for each byte of its slice."""
        return STATE_LIMIT

    def _keep(self, event: mirroring.Numbered) -> Effect:
        return Send(
            self._of, mirroring.Confirmed(self.incarnation, event.number, event.slot if isinstance(event, Bulk) else -1)
        )

    def _piece(self, sender: str, event: mirroring.StatePart, payload: Payload | None) -> list[Effect]:
        self._state.take(event, payload)
        return [self._keep(event)]

    def _take_whole(self, sender: str, event: mirroring.StateSent, payload: Payload | None) -> list[Effect]:
        shard, arrays = self._shard, self._state.arrays
        if arrays:
            self._held.load(arrays)
            self._state.arrays = {}
        shard.version, shard.samples, shard.staleness = Version(0, event.updates), event.samples, dict(event.staleness)
        shard.ledger.restore(event.taken)
        self._floor, self._whole = event.floor, True
        self._norms += event.norms
        for ruled in event.rulings:
            self._history.add(ruled)
            for key in ruled.dropped:
                shard.ledger.drop(*key)
        return [self._keep(event)]

    def _copy(self, sender: str, event: mirroring.Copied, payload: Payload | None) -> list[Effect]:
        if not self._whole or payload is None or len(event.keys) != len(event.staleness):
            raise RemoteProtocolError(f"{self.role} was sent a push before the state that it changes, or no push")
        if event.what is mirroring.CopyUse.APPLY:
            self._held.apply(sender, event.slot, payload, event.factor)
            self._updated(event.samples)
        elif event.what is mirroring.CopyUse.GATHER:
            self._held.gather(sender, event.slot, payload, event.factor, average=False)
            self._gathered, self._gathered_samples = self._gathered + 1, self._gathered_samples + event.samples
        else:
            self._held.take_sum(payload, len(event.keys))
            self._held.step(event.factor, event.weight, event.norms)
            if event.norms:
                self._norms.append(agreement.Norms(event.floor - 1, event.norms))
            self._updated(event.samples)
        self._floor = max(self._floor, event.floor)
        for key, staleness in zip(event.keys, event.staleness, strict=True):
            self._shard.ledger.note(key)
            self._shard.staleness[staleness] = self._shard.staleness.get(staleness, 0) + 1
        return [self._keep(event)]

    def _told(self, sender: str, event: mirroring.Decided, payload: Payload | None) -> list[Effect]:
        if event.step is not None:
            self._step(*event.step)
        if event.dropped is not None:
            self._shard.ledger.note(one := event.dropped)
            self._shard.ledger.drop(one.who, one.incarnation, one.clock)
        self._floor = max(self._floor, event.floor)
        if event.ruling is not None:
            self._history.add(event.ruling)
        return [self._keep(event)]

    def _step(self, samples: int, factor: float, weight: float) -> None:
        """Make an update with what was gathered."""
        self._held.step(factor, weight)
        self._gathered = self._gathered_samples = 0
        self._updated(samples)

    def _updated(self, samples: int) -> None:
        shard = self._shard
        shard.samples += samples
        shard.version = Version(0, shard.version.updates + 1)

    def _succeed(self, sender: str, event: mirroring.Succeed, payload: Payload | None) -> list[Effect]:
        """Be the shard; what was gathered for an update that nobody else will make, makes one."""
        if not self._whole:
            raise RemoteProtocolError(f"{self.role} is to be its shard, and does not hold what that held")
        if self._gathered:
            factor = self._plan.factor(self._shard.samples)
            self._step(self._gathered_samples, factor, 1.0 / self._gathered)
        self._shard.inherit(event.life, self._floor, self._history.since(0), self._norms)
        return [Become(self._of, event.life, self._shard)]
