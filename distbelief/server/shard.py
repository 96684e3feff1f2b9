"""The shard: the machine that holds one slice of the parameters and applies what replicas push to it (section 4.1 of
the paper).

A push applies whole or not at all, and at most once; between shards nothing is ordered. What waits for what is the
policy's (`core/consistency`): a push that is held stays where it lies, unacknowledged, and so its replica does not
write there.

A shard that takes the place of one that died goes on from the newest checkpoint: replicas tell it what the one before
had acknowledged beyond that, which is lost, and push again what it had not. With a standby (`server/standby.py`)
nothing is lost: it is told of every update, and what the update lets the shard say is said once the standby has it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec
import torch

from distbelief.core import events, messages, records, roles
from distbelief.core.consistency import Action, Drop, Key, PlannedUpdate, Policy, PolicyState
from distbelief.core.conversations import (
    agreement,
    attendance,
    checkpointing,
    initialising,
    membership,
    mirroring,
    pushing,
)
from distbelief.core.conversations.table import Conversation
from distbelief.core.effects import Connect, Effect, End, Load, Payload, Save, Send, WriteRecord
from distbelief.core.events import Event
from distbelief.core.ledger import SAMPLES_LIMIT, Ledger, PushTaken, Taking
from distbelief.core.messages import Version
from distbelief.core.norms import Exchange
from distbelief.core.protocol import SERVED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.rounds import Rounds
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server import optimizers
from distbelief.server.machine import Answers
from distbelief.server.mirror import Make, Mirror
from distbelief.server.pending_update import PendingUpdate, mean_rate, pushed, standing, taken, waiting
from distbelief.server.slice import Slice
from distbelief.sharding.layout import Range

# by names of their own: to look a member up in its class takes longer than to judge a push
APPLY, ACKNOWLEDGE, REFUSE = Taking
HOLD, GATHER, ANSWER = Action.HOLD, Action.GATHER, Action.ANSWER
APPLIED, GATHERED = mirroring.CopyUse.APPLY, mirroring.CopyUse.GATHER


RECENT = 4096
"""Updates of which a shard knows the model that they stepped: nothing is as stale as that."""
Handlers = Mapping[type, Callable[..., list[Effect]]]
"""The answer to each kind of event, from its sender, itself and its payload."""


class HeldRange:
    """Range of a shard, with what follows from it, from when the shard is told."""

    def __init__(self, plan: Plan, index: int, held: Slice) -> None:
        self.plan, self.slice = plan, held
        self.moving, self.frozen = plan.assignments[index].moving, plan.assignments[index].frozen
        self.parts = plan.parts(index)
        """Moving range of each model."""
        self.ranges = (self.moving, self.frozen, *self.parts)
        """All that may be asked for."""
        self.covers = [(part,) for part in self.parts]
        """Ranges that a push of each model covers at most."""
        self.skips = not plan.settings.standby
        """True where ranges that a push does not cover are left out: a standby steps all."""
        self.home = plan.layout.home_of(self.moving)
        """The partition of each replica that pushes here."""
        self.exchange = Exchange(plan, index)
        self.rate = plan.factor if plan.settings.rate.varies else _unvaried


def _covers_part(ranges: Sequence[Range], whole: Range) -> bool:
    """Return whether ranges are in order, within a whole."""
    ends = [whole.start, *(end for one in ranges for end in (one.start, one.stop)), whole.stop]
    return bool(ranges) and ends == sorted(ends)


def _unvaried(_samples: int) -> float:
    """The factor of a learning rate that is always the same."""
    return 1.0


class ShardState(msgspec.Struct, array_like=True, frozen=True):
    """Knowledge of a shard beside its slice, between two events: with it, another that has the slice goes on."""

    version: Version
    began: int
    samples: int
    staleness: dict[int, int]
    taken: tuple[PushTaken, ...]
    latest: dict[str, tuple[int, int]]
    policy: PolicyState


class Sums(Protocol):
    """Part of a shard that takes what replicas send where that is no push; a strategy gives it."""

    conversations: Iterable[Conversation]
    """In which shard and standby take part."""
    repeated: tuple[type, ...]
    """Messages to a standby about what its shard has done, beside those of every shard."""

    def handlers(self, shard: Shard) -> Handlers:
        """Return the answers to those who send it gradients, and to whoever decides about these."""
        ...

    def measured(self, shard: Shard) -> Payload:
        """The bytes of the moving range as the evaluator is to see them."""
        ...

    def state(self, shard: Shard) -> tuple[dict[str, torch.Tensor], mirroring.Summing, list[tuple[Make, Payload]]]:
        """Return the state for its standby: arrays, how far it is, and what is sent beside."""
        ...

    def repeat(self, shard: Shard, whole: bool, event: Any, payload: Payload | None) -> None:
        """Do what another has done, of which this shard holds the whole state or not yet."""
        ...

    def state_limit(self, plan: Plan) -> int:
        """Most bytes of a shard's state, for each byte of its slice."""
        ...

    def follow(self, shard: Shard, whole: mirroring.StateSent) -> None:
        """Be as far as another is."""
        ...


class Shard:
    """One server shard.

    Args:
        index: which of the plan's assignments it holds.
        make: makes the slice, once the plan is known.
        incarnation: of this shard; stands in every version it tells.
        sums: what becomes of what replicas send; where None, pushes, with which an optimizer steps.
    """

    def __init__(
        self, index: int, make: Callable[[Plan, int], Slice], incarnation: int = 0, sums: Sums | None = None
    ) -> None:
        self.index, self._make, self.role = index, make, roles.shard(index)
        self.version = Version(incarnation, 0)
        self._began = 0
        self.samples = 0
        self.staleness: dict[int, int] = {}
        self.ledger = Ledger()
        self.policy = Policy()
        self.sums = sums
        self._asks = self._succeeds = False
        self._pushes: dict[Key, tuple[pushing.Push, Payload]] = {}
        self._fetches: dict[tuple[str, int, int], pushing.Fetch] = {}
        self._others: dict[str, int] = {}
        self._own: HeldRange | None = None
        self._blank: set[Range] = set()
        self._latest: dict[str, tuple[int, int]] = {}
        self._stepped: deque[int] = deque(maxlen=RECENT)
        """Models that were stepped last, of several."""
        self.mirror = Mirror(roles.standby(index))
        self._inherits: tuple[int, list[agreement.Ruling], Iterable[agreement.Norms]] | None = None
        self._pending: PendingUpdate | None = None
        self._later: list[tuple[str, Event]] = []
        self._answers = Answers(
            "a shard",
            heard_by(Kind.SHARD, sums.conversations if sums else SERVED),
            {
                pushing.Fetch: self._fetch,
                initialising.Initialise: self._initialise,
                initialising.Restore: self._restore,
                events.Loaded: self._loaded,
                attendance.Attend: self._attend,
                attendance.SitOut: self._sit_out,
                attendance.Return: self._return,
                attendance.Departed: self._departed,
                agreement.Ruling: self._rule,
                agreement.Follow: self._follow,
                agreement.Norms: self._hear_norms,
                agreement.Ruler: lambda _sender, event, _payload: self._meet(event.place),
                events.Lent: self.mirror.lent,
                mirroring.BeginMirroring: self._begin_mirror,
                mirroring.Confirmed: self._kept,
                mirroring.Unmirrored: self._alone,
                checkpointing.Snapshot: self._snapshot,
                events.Saved: lambda _sender, event, _payload: [
                    Send(roles.COORDINATOR, checkpointing.SnapshotDone(event.number, event.error))
                ],
                checkpointing.Describe: lambda sender, _event, _payload: [
                    *self._settle(short=True),
                    Send(sender, self._description()),
                ],
                membership.Stop: lambda _sender, event, _payload: [End(event.reason)],
                events.Lost: self._lost,
                **(sums.handlers(self) if sums else {pushing.Push: self._push}),
            },
        )

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event; who breaks the protocol is told so by a `RemoteProtocolError`."""
        if self._pending is not None and isinstance(
            event, checkpointing.Snapshot | checkpointing.Describe | mirroring.BeginMirroring
        ):
            self._later.append((sender, event))  # an update is half made
            return []
        return self._answers.to(sender, type(event))(sender, event, payload)

    def _restore(self, sender: str, event: initialising.Restore, payload: Payload | None) -> list[Effect]:
        if self._own is not None and self._inherits is None:
            raise RemoteProtocolError(f"{self.role} was told its range before: a shard begins once")
        own = self.hold(event.plan) if self._inherits is None else self.own
        if self._inherits is None:
            self._blank |= {part for part in (own.moving, own.frozen) if part.size}
        settings = event.plan.settings
        self._govern(event.plan)
        if self._inherits is not None:
            floor, rulings, norms = self._inherits
            self.policy.resume(floor, rulings)
            own.exchange.resume(floor, norms)
        for who, incarnation in event.members:
            self.policy.attend(who, incarnation, 0)
        self._succeeds = bool(event.members)
        met = self._meet(event.ruler) if settings.strategy.rounds else []
        met += [effect for follower in self._others for effect in self._recall(follower)]
        if settings.standby:
            met.append(self.mirror.lend(max(own.moving.size, own.frozen.size, own.slice.sum_size)))
        if event.checkpoint and self._inherits is None:
            return [*met, Load(event.checkpoint, event.plan, self.index)]
        return [*met, self._restored(loaded=self._inherits is not None)]

    def _restored(self, loaded: bool) -> Send:
        return Send(roles.COORDINATOR, initialising.Restored(loaded, self.held.lasts))

    def hold(self, plan: Plan) -> HeldRange:
        """Make its slice of a plan."""
        self._own = HeldRange(plan, self.index, self._make(plan, self.index))
        return self._own

    def _govern(self, plan: Plan) -> None:
        """Begin with what the plan's strategy does with pushes and fetches."""
        settings = plan.settings
        self.policy = settings.strategy.policy(settings, rules=self.index == plan.ruler)
        self.policy.models = plan.models
        self._asks = self.policy.decides

    def share(self, plan: Plan) -> None:
        """Hold a slice of a plan that others hold too, each in its process: it is where `follow` says."""
        self.hold(plan)
        self._govern(plan)

    def state(self) -> ShardState:
        """Return the state, with pushes each of which is applied at once, and no fetch that waits."""
        return ShardState(
            self.version,
            self._began,
            self.samples,
            self.staleness,
            self.ledger.taken(),
            self._latest,
            self.policy.state(),
        )

    def follow(self, state: ShardState) -> None:
        """Be as far as another is that has the same slice."""
        self.version, self._began, self.samples = state.version, state.began, state.samples
        self.staleness, self._latest = dict(state.staleness), dict(state.latest)
        self.ledger.restore(state.taken)
        self.policy.restore(state.policy)

    def begin_life(self, incarnation: int) -> list[Effect]:
        """Be the next life of the shard whose state this one follows, in memory that has outlived its process."""
        self.version, self._began = Version(incarnation, self.version.updates), self.version.updates
        note = records.Note(f"{self.role} goes on from shared memory: nothing that was applied is lost")
        return [WriteRecord(note), self._restored(loaded=True)]

    def inherit(
        self, incarnation: int, floor: int, rulings: list[agreement.Ruling], norms: Iterable[agreement.Norms]
    ) -> None:
        """Be the next life of a shard, whose slice and counts it holds already."""
        self.version = Version(incarnation, self.version.updates)
        self._began, self._inherits = self.version.updates, (floor, rulings, norms)

    def _meet(self, ruler: messages.Address) -> list[Effect]:
        """Be told of the rounds by the shard that rules them, unless it is this one."""
        own = self.own
        who = roles.shard(own.plan.ruler)
        follow = Send(who, agreement.Follow(self.policy.floor))
        return [] if self.index == own.plan.ruler else [Connect(who, ruler), follow, *own.exchange.again()]

    def _loaded(self, sender: str, event: events.Loaded, payload: Payload | None) -> list[Effect]:
        self.held.load(event.arrays)
        self._blank.clear()
        self._began = event.facts["updates"]
        self.version = Version(self.version.incarnation, self._began)
        if self._succeeds:
            self.ledger.restore(PushTaken(*one) for one in event.facts.get("taken", ()))
        self.samples = event.facts["samples"]
        self.staleness = {int(staleness): count for staleness, count in event.facts["staleness"].items()}
        return [self._restored(loaded=True)]

    def _initialise(self, sender: str, event: initialising.Initialise, payload: Payload | None) -> list[Effect]:
        asked = Range(event.start, event.stop)
        frozen = self._which(sender, asked)
        others = [one.who for one in self.ledger.taken() if one.who != sender]
        if event.replaces and others:
            return [
                Send(
                    sender,
                    membership.Refused(
                        f"the script has written to its parameters, and {others[0]} trains them too: only one replica "
                        "alone may"
                    ),
                )
            ]
        # the first who initialises a range does: one who died doing it may be heard after its successor
        if payload is not None and (asked in self._blank or event.replaces):
            self._blank.discard(asked)
            self.held.fill(payload, frozen)
        return [Send(sender, initialising.Initialised(self.version))]

    def _push(self, sender: str, event: pushing.Push, payload: Payload | None) -> list[Effect]:
        here = self._own or self.own
        model = self._model(here, sender, event, payload)
        held = here.slice.of(model)
        assert payload is not None
        covered = event.ranges if here.skips and event.ranges != here.covers[model] else ()
        noted = self.ledger.judge(sender, event.partition, event.incarnation, event.clock)
        taking = noted.taking
        if taking is REFUSE:
            return []
        told: list[Effect] = []
        freed: list[Effect] = []
        if taking is APPLY:
            incarnation, updates = self.version
            staleness = self._staleness(here, event.version, model)
            if staleness < 0:
                raise RemoteProtocolError(
                    f"{sender} pushed to version {event.version.updates} of {self.role}, which is at {updates}"
                )
            self._latest[sender] = event.version.updates, staleness
            floor, factor = self.policy.floor, here.rate(self.samples) * event.rate
            if self._asks:
                key = Key(sender, event.incarnation, event.clock)
                if len(here.parts) > 1 and (why := self.policy.turn(key, event.tick, model, event.steps > 0)):
                    return [Send(sender, membership.Refused(why))]
                verdict = self.policy.push(key, event.tick, event.samples, staleness)
                if verdict.action is HOLD:
                    self._pushes[key] = event, payload
                    return self._settle()
                if verdict.action is GATHER:
                    scale = verdict.scale * event.rate
                    held.gather(sender, event.slot, payload, scale, average=False, covered=covered)
                    self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
                    version = Version(incarnation, updates + 1)
                    told = self._copy(GATHERED, sender, event, payload, staleness, scale)
                    return [*told, *self.mirror.after([pushed(sender, event, version)]), *self._settle()]
                factor *= verdict.scale
            held.set_options(event.options)
            held.apply(sender, event.slot, payload, factor, covered)
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
            self.samples += event.samples
            self._count(here, model)
            told = self._copy(APPLIED, sender, event, payload, staleness, factor)
            if self.policy.floor > floor:
                freed = self.let_go()
        elif self._holds(Key(sender, event.incarnation, event.clock)):
            return []
        else:
            self.policy.taken(sender, event.tick)
            freed = self.let_go()
        dropped = taking is ACKNOWLEDGE and self.ledger.dropped(sender, event.incarnation, event.clock)
        return [*told, *self.mirror.after([pushed(sender, event, self.version, dropped)]), *freed]

    def _holds(self, key: Key) -> bool:
        """Return whether a push that was taken waits to be applied."""
        return key in self._pushes or (self._pending is not None and self._pending.has(key))

    def _model(self, here: HeldRange, sender: str, event: pushing.Push, payload: Payload | None) -> int:
        """Return the model that a push is of.

        Raises:
            RemoteProtocolError: it is none that this shard can apply.
        """
        model, parts = 0, here.parts
        if len(parts) > 1 and (whole := Range(event.start, event.stop)) in parts:
            model = parts.index(whole)
        own = parts[model]
        if event.start != own.start or event.stop != own.stop or payload is None:
            raise RemoteProtocolError(
                f"{sender} pushed [{event.start}, {event.stop}) to {self.role}, which holds [{own.start}, {own.stop})"
            )
        known = event.encoding in pushing.ENCODINGS and event.partition == roles.partition_of(sender)
        if not known or not (event.ranges == here.covers[model] or _covers_part(event.ranges, own)):
            raise self._unread(sender, event)
        if event.options:
            self._check_options(here, sender, event, model)
        if not 0 <= event.samples <= SAMPLES_LIMIT or not 0.0 <= event.rate < math.inf:
            raise RemoteProtocolError(
                f"{sender} pushed the gradient of {event.samples} samples, at {event.rate} times the learning rate"
            )
        return model

    def _check_options(self, here: HeldRange, sender: str, event: pushing.Push, model: int) -> None:
        known = optimizers.numbers_of(here.plan.optimizer(model))
        most = len(known) * len(here.plan.layout.groups)
        for option in event.options:
            right = known.get(option.name, 0) == len(option.values) and all(
                0.0 <= one < math.inf for one in option.values
            )
            if not right or len(event.options) > most:
                raise RemoteProtocolError(
                    f"{sender} sets {option.name[:80]!r} to {option.values[:9]}: the optimizer of {self.role} has "
                    f"{', '.join(f'{count} of {name}' for name, count in known.items())}"
                )

    def _copy(
        self, use: mirroring.CopyUse, sender: str, event: pushing.Push, payload: Payload, staleness: int, factor: float
    ) -> list[Effect]:
        """Have the standby, where there is one, do the same with a push."""
        if self.mirror.place is None:
            return []
        one = taken(sender, event)
        return self.mirror.copy(use, payload, (one,), (staleness,), event.samples, factor, 1.0, self.policy.floor)

    def _unread(self, sender: str, event: pushing.Push) -> RemoteProtocolError:
        """The error for a push whose bytes this shard cannot read."""
        if event.encoding not in pushing.ENCODINGS:
            return RemoteProtocolError(
                f"{sender} pushed in encoding {event.encoding[:80]!r}, which {self.role} does not know: it knows "
                f"{', '.join(pushing.ENCODINGS)}; install the same distbelief everywhere"
            )
        if event.partition != roles.partition_of(sender):
            return RemoteProtocolError(f"{sender} pushed for partition {event.partition}, which it is not")
        covered = ", ".join(f"[{part.start}, {part.stop})" for part in event.ranges[:3])
        own = self.own.moving
        return RemoteProtocolError(
            f"{sender} pushed to {self.role} what covers {covered or 'nothing'}; it holds [{own.start}, {own.stop})"
        )

    def _staleness(self, here: HeldRange, version: Version, model: int) -> int:
        """Updates of a model since those in the parameters of a version; all that this life began with are in those of
        a life before.
        """
        (life, based), (incarnation, updates) = version, self.version
        since = updates - (based if life == incarnation else min(based, self._began))
        if len(here.parts) == 1 or since <= 0:
            return since
        return sum(stepped == model for stepped in islice(reversed(self._stepped), since))

    def _count(self, here: HeldRange, model: int) -> None:
        """One more update is made."""
        incarnation, updates = self.version
        self.version = Version(incarnation, updates + 1)
        if len(here.parts) > 1:
            self._stepped.append(model)

    def _fetch(self, sender: str, event: pushing.Fetch, payload: Payload | None) -> list[Effect]:
        start, stop = event.start, event.stop
        asked = Range(start, stop)
        frozen = self._which(sender, asked)
        if self.sums is not None and sender == roles.EVALUATOR and not frozen:
            answer = pushing.Fetched(event.slot, start, stop, self.version, number=event.number)
            return [Send(sender, answer, self.sums.measured(self))]
        if self._asks and not frozen and not self.may_fetch(sender, event.tick):
            held_back = self._fetches.get((sender, start, event.slot))
            if held_back is not None and held_back.incarnation == event.incarnation:  # each is answered once
                raise RemoteProtocolError(
                    f"{sender} fetches [{start}, {stop}) of {self.role} again, and waits for that already"
                )
            self._fetches[sender, start, event.slot] = event
            return []
        here = self._own or self.own
        if frozen:
            held = here.slice.frozen()
        elif asked == here.moving:
            held = here.slice.moving()
        else:
            held = here.slice.of(here.parts.index(asked)).moving()
        answer = pushing.Fetched(event.slot, start, stop, self.version, self._floor, event.number)
        return [Send(sender, answer, held)]

    def may_fetch(self, who: str, tick: int) -> bool:
        """Return whether a step may begin with the parameters as they are."""
        return (
            self._pending is None
            and self.mirror.covers(self.policy.floor)
            and self.policy.fetch(who, tick).action is ANSWER
        )

    def _settle(self, short: bool = False) -> list[Effect]:
        """Do what is due with the pushes that were gathered or held, then answer the fetches that waited for it."""
        effects: list[Effect] = []
        if isinstance(self.policy, Rounds):
            for who, tick in self.policy.admitted():
                effects += self.mirror.after([Send(who, attendance.Admitted(tick))])
            for ruling in self.policy.untold():
                effects += self.mirror.tell(ruling=ruling)
                effects += self.mirror.after([Send(role, ruling) for role in self._others])
        made: list[Effect] = []
        while self._pending is None and (due := self.policy.due(short)) is not None:
            made += self._drop(due) if isinstance(due, Drop) else self._update(due)
        effects += self._own.exchange.pass_over(self._floor) if self._own else []
        return effects + made + self.let_go() if made else effects + self.mirror.tell_floor(self._floor)

    @property
    def _floor(self) -> int:
        """The floor of the policy, without the round that is half made."""
        return self.policy.floor - (self._pending is not None)

    def _update(self, due: PlannedUpdate) -> list[Effect]:
        """Begin an optimizer step, and make it unless norms of other shards are in it; held pushes are read where they
        lie.
        """
        own, part = self.own, self.held.of(due.model)
        held = [(key, weight, *self._pushes.pop(key)) for key, weight in due.parts]
        stale = tuple(self._staleness(own, push.version, due.model) for _, _, push, _ in held)
        for (key, weight, push, payload), staleness in zip(held, stale, strict=True):
            covered = push.ranges if own.skips and push.ranges != own.covers[due.model] else ()
            part.gather(key.who, push.slot, payload, weight, average=True, covered=covered)
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        factor = own.rate(self.samples) * mean_rate([push for _, _, push, _ in held])
        self._pending = PendingUpdate(due, factor, [(key, push) for key, _, push, _ in held], stale)
        said = own.exchange.say(self._floor, part.squares()) if own.exchange.takes_part else []
        return said + self._finish()

    def _finish(self) -> list[Effect]:
        """Make the step that was begun, once the norms that it needs are known."""
        made, own = self._pending, self.own
        norms = own.exchange.whole(self._floor) if own.exchange.takes_part else ()
        if made is None or norms is None:
            return []
        self._pending, part = None, own.slice.of(made.due.model)
        told = made.mirrored(self.mirror, part, self.policy.floor, norms)
        part.set_options(made.taken[0][1].options if made.taken else ())
        part.step(made.factor, made.due.weight, norms)
        self.samples += made.due.samples
        self._count(own, made.due.model)
        return told + self.mirror.after(made.acknowledged(self.version))

    def _hear_norms(self, sender: str, event: agreement.Norms, payload: Payload | None) -> list[Effect]:
        """Take what a shard adds to the norms of a round, or their sums over all."""
        told = [*self.own.exchange.take(sender, event), *self._finish()]
        if self._pending is None:
            told += self._settle() + self.let_go()
            later, self._later = self._later, []
            told += [effect for asker, asked in later for effect in self.handle(asker, asked, None)]
        return told

    def _drop(self, due: Drop) -> list[Effect]:
        push, _ = self._pushes.pop(due.key)
        self.ledger.drop(*due.key)
        return self.mirror.tell(dropped=taken(due.key.who, push)) + self.mirror.after(
            [pushed(due.key.who, push, self.version, dropped=True)]
        )

    def let_go(self) -> list[Effect]:
        """Answer the held fetches that may be answered now."""
        effects = self.mirror.tell_floor(self._floor)
        for (who, start, slot), event in list(self._fetches.items()):
            if self.may_fetch(who, event.tick):
                del self._fetches[who, start, slot]
                effects += self._fetch(who, event, None)
        return effects

    # who takes part

    def _attend(self, sender: str, event: attendance.Attend, payload: Payload | None) -> list[Effect]:
        tick = self.policy.attend(sender, event.incarnation, event.tick, event.epoch)
        asked = self.mirror.after([Send(sender, attendance.Admitted(tick))] if event.tick < 0 <= tick else [])
        return asked + self._settle() + self.let_go()

    def _return(self, sender: str, event: attendance.Return, payload: Payload | None) -> list[Effect]:
        """Learn what the life before had acknowledged; what of that is not in the checkpoint is lost."""
        lost = self.ledger.resume(sender, event.partition, event.incarnation, event.clock)
        first = event.clock - lost + 1
        return (
            [WriteRecord(records.Forgotten(self.role, sender, event.incarnation, first, event.clock))] if lost else []
        )

    def _sit_out(self, sender: str, event: attendance.SitOut, payload: Payload | None) -> list[Effect]:
        self.policy.rest(sender, event.incarnation, event.epoch)
        return [*self._settle(), *self.let_go(), Send(sender, attendance.Excused())]

    def _departed(self, sender: str, event: attendance.Departed, payload: Payload | None) -> list[Effect]:
        told = self._without(event.who, event.incarnation)
        rules = isinstance(self.policy, Rounds) and self.index == self.own.plan.ruler
        return told + (self.mirror.after([Send(roles.COORDINATOR, event)]) if rules else [])

    def _without(self, who: str, incarnation: int) -> list[Effect]:
        self._forget_fetches(who, incarnation)
        self.policy.leave(who, incarnation)
        return self._settle() + self.let_go()

    def _forget_fetches(self, who: str, incarnation: int) -> None:
        """Answer no fetch of a life that is over, or of any before it."""
        gone = [
            key
            for key, event in self._fetches.items()
            if key[0] == who and (incarnation < 0 or event.incarnation <= incarnation)
        ]
        for key in gone:
            del self._fetches[key]

    # the standby

    def _begin_mirror(self, sender: str, event: mirroring.BeginMirroring, payload: Payload | None) -> list[Effect]:
        """Send a standby all that this shard holds, and from here on what changes."""
        made = self._settle(short=True)
        rulings = tuple(self.policy.history.since(0)) if isinstance(self.policy, Rounds) else ()
        applied = {one[:2]: one for one in self.ledger.taken()}
        for key, (push, _) in self._pushes.items():  # what is held is taken, and not in what is sent
            before = taken(key.who, push)._replace(clock=key.clock - 1)
            applied[before[:2]] = min(applied[before[:2]], before)
        incarnation, updates = self.version
        arrays, summing, beside = self.sums.state(self) if self.sums else (self.held.arrays(), None, ())
        whole = mirroring.StateSent(
            incarnation,
            0,
            updates,
            self.samples,
            dict(self.staleness),
            tuple(applied.values()),
            self.policy.floor,
            rulings,
            self.own.exchange.known(),
            summing,
        )
        return [*made, *self.mirror.begin(event.place, arrays, whole, beside)]

    def _kept(self, sender: str, event: mirroring.Confirmed, payload: Payload | None) -> list[Effect]:
        said, whole = self.mirror.kept(event)
        told: list[Effect] = [Send(roles.COORDINATOR, mirroring.Mirrored(event.incarnation))] if whole else []
        return told + said + self.let_go()

    def _alone(self, sender: str, event: mirroring.Unmirrored, payload: Payload | None) -> list[Effect]:
        if self.mirror.place is None or self.mirror.place.incarnation != event.incarnation:
            return []
        return self.mirror.end() + self.let_go()

    # rounds

    def _follow(self, sender: str, event: agreement.Follow, payload: Payload | None) -> list[Effect]:
        self._others[sender] = event.round
        return self._recall(sender)

    def _recall(self, follower: str) -> list[Effect]:
        """Tell a shard the rulings that it may have missed."""
        known = self.policy.history.since(self._others[follower]) if isinstance(self.policy, Rounds) else []
        return self.mirror.after([Send(follower, ruled) for ruled in known])

    def _rule(self, sender: str, event: agreement.Ruling, payload: Payload | None) -> list[Effect]:
        if not isinstance(self.policy, Rounds) or self._own is None or sender != roles.shard(self._own.plan.ruler):
            raise RemoteProtocolError(f"{sender} rules a round, and does not rule this job")
        self.policy.rule(event.at_partition(self._own.home))
        # a round of nobody who is left makes no update, and yet those who waited for it may go on
        return self._settle() + self.let_go()

    def _snapshot(self, sender: str, event: checkpointing.Snapshot, payload: Payload | None) -> list[Effect]:
        made = self._settle(short=True)  # what was acknowledged is in the parameters that are saved
        facts = {"updates": self.version.updates, "samples": self.samples, "staleness": {str(k): v for k,
            v in self.staleness.items()},
                 "taken": self.ledger.taken()}  # fmt: skip
        return [*made, Save(event.number, f"shard-{self.index}", self.held.arrays(), facts)]

    def _lost(self, sender: str, event: events.Lost, payload: Payload | None) -> list[Effect]:
        if roles.is_replica(sender) and self._own is not None:
            return self._without(sender, event.incarnation)
        if sender == roles.EVALUATOR:
            self._forget_fetches(sender, event.incarnation)
            return []
        if (
            sender == self.mirror.standby
            and self.mirror.place is not None
            and event.incarnation in (-1, self.mirror.place.incarnation)
        ):
            return [Send(roles.COORDINATOR, mirroring.StandbyLost(self.mirror.place.incarnation))]
        return [End("the coordinator is gone")] if sender == roles.COORDINATOR else []

    def _description(self) -> checkpointing.Description:
        return checkpointing.Description(self.version, self.samples, dict(self.staleness))

    def waiting(self) -> dict[str, str]:
        """Why each replica waits whose push or fetch is held here, in a sentence."""
        return waiting(self.policy, self._fetches, self._pushes)

    def waits(self) -> str:
        """Say in one sentence what it waits for."""
        if self._own is None:
            return "to be told its range"
        return "to be sent its first parameters" if self._blank else ""

    def standing(self) -> dict[str, object]:
        """Return what it has applied, and of whom."""
        return {"version": self.version.updates, "of": standing(self.ledger.taken(), self._latest, self.waiting())}

    @property
    def own(self) -> HeldRange:
        """Range that it holds.

        Raises:
            RemoteProtocolError: nobody has told it its range.
        """
        if self._own is None:
            raise RemoteProtocolError(f"{self.role} has not been told its range yet")
        return self._own

    @property
    def held(self) -> Slice:
        """Its slice; as `own`."""
        return self.own.slice

    def _which(self, sender: str, asked: Range) -> bool:
        """Return whether a range is the frozen one; it must be that or a moving one."""
        own = self._own
        if own is None or asked not in own.ranges:
            raise RemoteProtocolError(
                f"{sender} names [{asked.start}, {asked.stop}), which is not what {self.role} holds"
            )
        return asked == own.frozen and asked != own.moving
