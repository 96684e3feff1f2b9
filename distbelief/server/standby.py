"""The standby: the machine that holds all that its shard has acknowledged, and can take its place.

It makes the same optimizer steps in the same order, and confirms each. The shard decides what is applied, gathered or
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

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
from distbelief.server.mirror import Unpacking
from distbelief.server.shard import MakeSlice, Shard, Sums

STATE_LIMIT = 16
"""Most bytes of a shard's state for each byte of its slice, beyond `STATE_LEAST`; `Sums` set another limit."""
STATE_LEAST = 1 << 16


class Following:
    """Copy of one incarnation of a shard."""

    def __init__(self, plan: Plan, incarnation: int, shard: Shard) -> None:
        self.plan, self.incarnation, self.shard = plan, incarnation, shard
        self.held = shard.hold(plan).slice
        self.whole = False
        """True once it has the whole state of its shard."""
        self.floor = 0
        limit = shard.sums.state_limit(plan) if shard.sums else STATE_LIMIT
        self._state = Unpacking(STATE_LEAST + limit * (shard.own.moving.size + shard.own.frozen.size))
        self._history = History()
        self._gathered = self._gathered_samples = 0
        self._norms: deque[agreement.Norms] = deque(maxlen=KEPT)

    def take_part(self, sender: str, event: mirroring.StatePart, payload: Payload | None) -> None:
        """Take some bytes of the state."""
        self._state.take(event, payload)

    def take_whole(self, sender: str, event: mirroring.StateSent, payload: Payload | None) -> None:
        """Take the end of the state: the counts of the shard."""
        shard, arrays = self.shard, self._state.arrays
        if arrays:
            self.held.load(arrays)
            self._state.arrays = {}
        counts = {name: getattr(event, name) for name in ("samples", "staleness", "taken")}
        shard.install(msgspec.structs.replace(shard.state(), version=Version(0, event.updates), **counts))
        if shard.sums is not None:
            shard.sums.follow(shard, event)
        self.floor, self.whole = event.floor, True
        self._norms += event.norms
        for ruling in event.rulings:
            self._history.add(ruling)
            for key in ruling.dropped:
                shard.ledger.drop(*key)

    def copy(self, sender: str, event: mirroring.Copied, payload: Payload | None) -> None:
        """Apply or gather a push, or make an update with the sum of several."""
        # The shard sends the factor of the learning rate and the staleness, since a standby has no policy to compute
        # them. The ledger notes the keys: a push that comes again, because the shard died before it acknowledged it, is
        # not applied twice.
        shard = self.shard
        if not self.whole or payload is None or len(event.keys) != len(event.staleness):
            raise RemoteProtocolError(
                f"{roles.standby_of(shard.role)} got a push without bytes, or before the state that it changes"
            )
        if event.what is mirroring.CopyUse.APPLY:
            self.held.set_options(shard.own.period(event.period))
            self.held.apply(sender, event.slot, payload, event.factor)
            shard.count_update(event.samples)
        elif event.what is mirroring.CopyUse.GATHER:
            self.held.gather(sender, event.slot, payload, event.factor, average=False)
            self._gathered, self._gathered_samples = self._gathered + 1, self._gathered_samples + event.samples
        else:
            self.held.take_sum(payload, len(event.keys))
            self.held.step(event.factor, event.weight, event.norms)
            if event.norms:
                self._norms.append(agreement.Norms(event.floor - 1, event.norms))
            shard.count_update(event.samples)
        self.floor = max(self.floor, event.floor)
        for key, staleness in zip(event.keys, event.staleness, strict=True):
            shard.ledger.note(key)
            shard.count_push(staleness)

    def decide(self, sender: str, event: mirroring.Decided, payload: Payload | None) -> None:
        """Make an update with the gathered sum, drop a push, note a ruling."""
        if event.step is not None:
            self._step(*event.step)
        if (push := event.dropped) is not None:
            self.shard.ledger.note(push)
            self.shard.ledger.drop(push.who, push.incarnation, push.clock)
        self.floor = max(self.floor, event.floor)
        if event.ruling is not None:
            self._history.add(event.ruling)

    def repeat(self, sender: str, event: mirroring.Numbered, payload: Payload | None) -> None:
        """Repeat a change that the strategy's `Sums` define."""
        assert self.shard.sums is not None
        self.shard.sums.repeat(self.shard, self.whole, event, payload)
        self.floor = max(self.floor, self.shard.policy.floor)

    def _step(self, samples: int, factor: float, weight: float) -> None:
        self.held.step(factor, weight)
        self._gathered = self._gathered_samples = 0
        self.shard.count_update(samples)

    def succeed(self, incarnation: int) -> Shard:
        """Make the next incarnation of the shard."""
        # gathered pushes are acknowledged, but the next incarnation's policy does not have them: they make an update
        # now
        if self._gathered:
            factor = self.shard.own.rate(self.shard.samples)
            self._step(self._gathered_samples, factor, 1.0 / self._gathered)
        self.shard.inherit(incarnation, self.floor, self._history.since(0), self._norms)
        return self.shard


# A standby follows one incarnation of its shard, or none: it first collects the state, then (`whole`) repeats each
# change in the shard's order and confirms its number. The same steps in the same order give the same bits. Messages of
# other incarnations are ignored, since a link may still deliver those of an earlier one.
class Standby:
    """The standby of one shard.

    Args:
        make: makes its slice, once the plan is known.
        sums: makes the `Sums` of the shard, where gradients are no pushes.
    """

    def __init__(
        self, index: int, make: MakeSlice, incarnation: int = 0, sums: Callable[[], Sums] | None = None
    ) -> None:
        self.index, self.incarnation, self._make, self._sums = index, incarnation, make, sums
        self.role, self._shard = roles.standby(index), roles.shard(index)
        self.following: Following | None = None
        summing = sums() if sums else None
        self._repeats: dict[type, Callable[..., None]] = {
            mirroring.StatePart: Following.take_part,
            mirroring.StateSent: Following.take_whole,
            mirroring.Copied: Following.copy,
            mirroring.Decided: Following.decide,
            **dict.fromkeys(summing.repeated if summing else (), Following.repeat),
        }
        self._answers = Answers(
            self.role,
            heard_by(Kind.STANDBY, summing.conversations if summing else SERVED),
            {
                mirroring.Stand: self._stand,
                mirroring.Succeed: self._succeed,
                membership.Stop: lambda _sender, event, _payload: [End(event.reason)],
                events.Lost: lambda sender, _event, _payload: (
                    [End("the coordinator is gone")] if sender == roles.COORDINATOR else []
                ),
                **dict.fromkeys(self._repeats, self._repeat),
            },
        )

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        if roles.kind(sender) is roles.Kind.SHARD and sender != self._shard:
            raise RemoteProtocolError(f"{self.role} is not the standby of {sender}")
        return self._answers.to(sender, type(event))(sender, event, payload)

    def _repeat(self, sender: str, event: mirroring.Numbered, payload: Payload | None) -> list[Effect]:
        """Repeat a change of the shard, and confirm it."""
        if self.following is None or event.incarnation != self.following.incarnation:
            return []  # late messages from an incarnation that is gone
        self._repeats[type(event)](self.following, sender, event, payload)
        slot = event.slot if isinstance(event, Bulk) else -1
        return [Send(self._shard, mirroring.Confirmed(self.incarnation, event.number, slot))]

    def waits(self) -> str:
        return "" if self.following and self.following.whole else "to be sent what its shard holds"

    def standing(self) -> dict[str, object]:
        now = self.following
        return {"version": now.shard.version.updates} if now and now.whole else {}

    def _stand(self, sender: str, event: mirroring.Stand, payload: Payload | None) -> list[Effect]:
        # a copy of another incarnation may be ahead of one that went back to a checkpoint: begin with nothing
        self.following = Following(event.plan, event.incarnation, Shard(self.index, self._make, sums=self._sums))
        return [Send(roles.COORDINATOR, mirroring.Stands(event.incarnation))]

    def _succeed(self, sender: str, event: mirroring.Succeed, payload: Payload | None) -> list[Effect]:
        if self.following is None or not self.following.whole:
            raise RemoteProtocolError(f"{self.role} is to take its shard's place, and does not have the whole state")
        return [Become(self._shard, event.incarnation, self.following.succeed(event.incarnation))]
