"""The shard: the machine that holds one slice of the parameters and applies what replicas push (the paper's 4.1).

A push is applied whole or not at all, and at most once; between shards nothing is ordered. The policy
(`core/consistency`) decides what waits for what. A held push stays in its slot unacknowledged, so its replica does not
write there.

A shard that replaces a dead one begins from the newest checkpoint. Replicas tell it what the earlier one had
acknowledged beyond that, which is lost, and push again what it had not acknowledged. With a standby
(`server/standby.py`) nothing is lost: it receives every update, and the shard acknowledges an update once the standby
has it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
from distbelief.core.optimizer import DELAYED, GroupOption
from distbelief.core.protocol import SERVED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.rounds import Rounds
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server import optimizers
from distbelief.server.machine import Answers, Handlers
from distbelief.server.mirror import Make, Mirror, PendingUpdate, acknowledgement, mean_rate, push_taken
from distbelief.server.slice import Slice
from distbelief.sharding.layout import Range

# names for the members: to look a member up in its class takes longer than to judge a push
APPLY, ACKNOWLEDGE, REFUSE = Taking
HOLD, GATHER, ANSWER = Action.HOLD, Action.GATHER, Action.ANSWER
APPLIED, GATHERED = mirroring.CopyUse.APPLY, mirroring.CopyUse.GATHER


MakeSlice = Callable[[Plan, int], Slice]
"""Maker of a shard's slice, from the plan and the shard's number."""
RECENT = 4096
"""Number of updates whose model a shard remembers; no push is staler."""


class HeldRange:
    """Range that a shard holds, with values that follow from it: each push needs them."""

    def __init__(self, plan: Plan, index: int, held: Slice) -> None:
        self.plan, self.slice = plan, held
        self.moving, self.frozen = plan.assignments[index].moving, plan.assignments[index].frozen
        self.parts = plan.parts(index)
        """Moving range of each model."""
        self.ranges = (self.moving, self.frozen, *self.parts)
        """Ranges that may be fetched."""
        self.covers = [(part,) for part in self.parts]
        """Ranges of a push of each model that leaves nothing out."""
        # a standby receives a push's bytes without its ranges, and must make the same step: with a standby, gaps count
        # as zero gradients
        self.skips = not plan.settings.standby
        """True where parameters that a push does not cover are not stepped."""
        self.partition = plan.layout.partition_of(self.moving)
        """Partition of each replica that pushes here."""
        self.exchange = Exchange(plan, index)
        self.has_period = plan.settings.optimizer.name == DELAYED
        """True where the optimizer has a period, in which each replica pushes once."""
        self.rate: Callable[[int], float] = plan.factor if plan.settings.rate_varies else lambda _samples: 1.0
        """Factor of the learning rate after so many samples."""

    def period(self, replicas: int) -> tuple[GroupOption, ...]:
        """Return the options of an optimizer whose period is of so many replicas; none for 0."""
        groups = range(len(self.plan.layout.groups) if replicas else 0)
        return tuple(GroupOption(group, "period", (replicas,)) for group in groups)


def _covers_part(ranges: Sequence[Range], whole: Range) -> bool:
    """Return whether ranges are in order and within a whole."""
    ends = [whole.start, *(end for part in ranges for end in (part.start, part.stop)), whole.stop]
    return bool(ranges) and ends == sorted(ends)


class ShardState(msgspec.Struct, array_like=True, frozen=True):
    """State of a shard beside its slice."""

    version: Version
    began: int
    samples: int
    staleness: dict[int, int]
    taken: tuple[PushTaken, ...]
    latest: dict[str, tuple[int, int]]
    policy: PolicyState


class Sums(Protocol):
    """Part of a shard that takes gradients other than pushes; a strategy supplies it."""

    conversations: Iterable[Conversation]
    """Conversations of the shard and the standby."""
    repeated: tuple[type, ...]
    """Messages by which a standby repeats changes, beside those of every shard."""

    def handlers(self, shard: Shard) -> Handlers:
        """Return the handlers of gradients, and of decisions about them."""

    def measured(self, shard: Shard) -> Payload:
        """Return the bytes of the moving range for the evaluator."""

    def state(self, shard: Shard) -> tuple[dict[str, torch.Tensor], mirroring.Summing, list[tuple[Make, Payload]]]:
        """Return the state for a standby: arrays, the state of the sum, and messages with bytes."""

    def repeat(self, shard: Shard, whole: bool, event: Any, payload: Payload | None) -> None:
        """Repeat a change at a standby; `whole` once it has the whole state."""

    def state_limit(self, plan: Plan) -> int:
        """Return the most bytes of a shard's state for each byte of its slice."""

    def follow(self, shard: Shard, whole: mirroring.StateSent) -> None:
        """Take the state of the sum from the end of a shard's state."""


# A shard gets its range, then its first values from a checkpoint or a replica (ranges without values are `_blank`), and
# then serves. The coordinator decides when: it welcomes replicas once all shards hold parameters.
#
# Between two events the slice, version, ledger and counts are of one moment, since each event is handled to its end.
# The exception is an update that waits for other shards' norms of cut layers (`_pending`): `_floor` excludes its round,
# fetches of the moving range wait, and so do events that read the state (`_later`).
#
# A push that the ledger takes is applied, gathered or held. Applied: it is in the parameters. Gathered: it is added to
# the next update and acknowledged, since its slot is not read again. Held: it stays in its slot, and is acknowledged
# once it is in an update, or dropped. With a standby, a push is acknowledged only after the standby has confirmed it
# (`Mirror.after`).
class Shard:
    """One server shard.

    Args:
        make: makes the slice, once the plan is known.
        sums: makes what takes gradients other than pushes; None for pushes.
    """

    def __init__(
        self, index: int, make: MakeSlice, incarnation: int = 0, sums: Callable[[], Sums] | None = None
    ) -> None:
        self.index, self._make, self.role = index, make, roles.shard(index)
        self.version = Version(incarnation, 0)
        self._began = 0
        self.samples = 0
        self.staleness: dict[int, int] = {}
        self.ledger = Ledger()
        self.policy = Policy()
        self.sums = summing = sums() if sums else None
        self._policy_decides = False
        """True where the policy decides on pushes and fetches."""
        self._succeeds = False
        """True where it replaces a dead shard while the replicas continue."""
        self._pushes: dict[Key, tuple[pushing.Push, Payload]] = {}
        """Held pushes."""
        self._fetches: dict[tuple[str, int, int], pushing.Fetch] = {}
        """Held fetches, by replica, start of the range and slot."""
        self._followers: dict[str, int] = {}
        """Shards that follow this one's rulings, with the first round of each."""
        self._held_range: HeldRange | None = None
        self._blank: set[Range] = set()
        """Ranges without values."""
        self._latest: dict[str, tuple[int, int]] = {}
        """Version and staleness of each replica's last push."""
        self._stepped: deque[int] = deque(maxlen=RECENT)
        """Models of the last updates, of several."""
        self.mirror = Mirror(roles.standby(index))
        self._inherits: tuple[int, list[agreement.Ruling], Iterable[agreement.Norms]] | None = None
        """Floor, rulings and norms of the incarnation before, where this was its standby."""
        self._pending: PendingUpdate | None = None
        """Update that waits for norms of cut layers."""
        self._later: list[tuple[str, Event]] = []
        """Events that wait for that update, with their senders."""
        self._answers = Answers(
            "a shard",
            heard_by(Kind.SHARD, summing.conversations if summing else SERVED),
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
                agreement.Norms: self._take_norms,
                agreement.Ruler: lambda _sender, event, _payload: self._follow_ruler(event.place),
                events.Lent: self.mirror.lent,
                mirroring.BeginMirroring: self._begin_mirror,
                mirroring.Confirmed: self._confirmed,
                mirroring.Unmirrored: self._unmirrored,
                checkpointing.Snapshot: self._snapshot,
                events.Saved: lambda _sender, event, _payload: [
                    Send(roles.COORDINATOR, checkpointing.SnapshotDone(event.number, event.error, event.seconds))
                ],
                checkpointing.Describe: lambda sender, _event, _payload: [
                    *self._settle(short=True),
                    Send(sender, checkpointing.Description(self.version, self.samples, dict(self.staleness))),
                ],
                membership.Stop: lambda _sender, event, _payload: [End(event.reason)],
                events.Lost: self._lost,
                **(summing.handlers(self) if summing else {pushing.Push: self._push}),
            },
        )

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        # These three handlers read the shard's state, which is not of one moment during an update: pushes that were
        # taken are not yet in the parameters, and a checkpoint does not contain their sum.
        if self._pending is not None and isinstance(
            event, checkpointing.Snapshot | checkpointing.Describe | mirroring.BeginMirroring
        ):
            self._later.append((sender, event))
            return []
        return self._answers.to(sender, type(event))(sender, event, payload)

    def validate(self) -> None:
        """Assert what holds between two events."""
        self.policy.validate()
        for key, (push, _) in self._pushes.items():
            known = self.ledger.has(key.who, push.partition, key.incarnation, key.clock)
            assert known, f"{self.role} holds push {key}, which its ledger has not taken"
        for (who, _, _), event in self._fetches.items():
            assert not self.may_fetch(who, event.tick), f"the fetch of {who} at tick {event.tick} waits for nothing"
        assert self._pending is not None or not self._later, f"{self._later} wait for an update that is made"
        assert self.version.updates >= self._began, f"{self.version} is before {self._began}, where this life began"

    def _restore(self, sender: str, event: initialising.Restore, payload: Payload | None) -> list[Effect]:
        # A former standby has slice and counts, and inherits floor, rulings and norms: it loads nothing. Any other
        # shard begins blank, or from a checkpoint. Members take part at once, before their own messages: otherwise a
        # bound or a round would not wait for those that have not reached this incarnation yet.
        if self._inherits is None:
            if self._held_range is not None:
                raise RemoteProtocolError(f"{self.role} has its range already, and takes one only once")
            held_range = self.hold(event.plan)
            self._blank |= {part for part in (held_range.moving, held_range.frozen) if part.size}
        held_range, settings = self.own, event.plan.settings
        self._set_policy(event.plan)
        if self._inherits is not None:
            floor, rulings, norms = self._inherits
            self.policy.resume(floor, rulings)
            held_range.exchange.resume(floor, norms)
        self.policy.begin(event.members)
        self._succeeds = bool(event.members)
        effects = self._follow_ruler(event.ruler) if settings.policy.rounds else []
        effects += [effect for follower in self._followers for effect in self._tell_rulings(follower)]
        if settings.standby:
            most = max(held_range.moving.size, held_range.frozen.size, held_range.slice.sum_size)
            effects.append(self.mirror.lend(most))
        if event.checkpoint and self._inherits is None:
            return [*effects, Load(event.checkpoint, event.plan, self.index)]
        return [*effects, self._restored(loaded=self._inherits is not None)]

    def _restored(self, loaded: bool) -> Send:
        return Send(roles.COORDINATOR, initialising.Restored(loaded, self.held.lasts))

    def hold(self, plan: Plan) -> HeldRange:
        """Make the slice of a plan."""
        self._held_range = HeldRange(plan, self.index, self._make(plan, self.index))
        return self._held_range

    def _set_policy(self, plan: Plan) -> None:
        settings = plan.settings
        self.policy = settings.strategy.policy(settings, rules=self.index == plan.ruler)
        self.policy.models = plan.models
        self._policy_decides = self.policy.decides

    def share(self, plan: Plan) -> None:
        """Hold a slice that other processes hold too; `install` sets the state."""
        self.hold(plan)
        self._set_policy(plan)

    def state(self) -> ShardState:
        """Return the state of a shard without held pushes and fetches."""
        taken, policy = self.ledger.taken(), self.policy.state()
        return ShardState(self.version, self._began, self.samples, self.staleness, taken, self._latest, policy)

    def install(self, state: ShardState) -> None:
        """Take the state of a shard whose slice this one has."""
        self.version, self._began, self.samples = state.version, state.began, state.samples
        self.staleness, self._latest = dict(state.staleness), dict(state.latest)
        self.ledger.restore(state.taken)
        self.policy.restore(state.policy)

    def begin_life(self, incarnation: int) -> list[Effect]:
        """Begin another incarnation, on memory and state that outlived the process of the last one."""
        self.version, self._began = Version(incarnation, self.version.updates), self.version.updates
        note = records.Note(f"{self.role} goes on from shared memory: nothing that was applied is lost")
        return [WriteRecord(note), self._restored(loaded=True)]

    def inherit(
        self, incarnation: int, floor: int, rulings: list[agreement.Ruling], norms: Iterable[agreement.Norms]
    ) -> None:
        """Begin the next incarnation of a shard whose slice and counts this one has."""
        self.version = Version(incarnation, self.version.updates)
        self._began, self._inherits = self.version.updates, (floor, rulings, norms)

    def _follow_ruler(self, ruler: messages.Address) -> list[Effect]:
        """Ask the shard that rules the rounds for its rulings, unless this one rules."""
        who = roles.shard(self.own.plan.ruler)
        follow = Send(who, agreement.Follow(self.policy.floor))
        return [] if who == self.role else [Connect(who, ruler), follow, *self.own.exchange.again()]

    def _loaded(self, sender: str, event: events.Loaded, payload: Payload | None) -> list[Effect]:
        self.held.load(event.arrays)
        self._blank.clear()
        facts, updates = event.facts, event.facts["updates"]
        # where all go back together, replicas count pushes from 1 again: only a shard that goes back alone needs the
        # pushes of the checkpoint
        pushes = facts.get("taken", ()) if self._succeeds else ()
        self.install(
            msgspec.structs.replace(
                self.state(),
                version=Version(self.version.incarnation, updates),
                began=updates,
                samples=facts["samples"],
                staleness={int(staleness): count for staleness, count in facts["staleness"].items()},
                taken=tuple(PushTaken(*push) for push in pushes),
            )
        )
        return [self._restored(loaded=True)]

    def _initialise(self, sender: str, event: initialising.Initialise, payload: Payload | None) -> list[Effect]:
        part = Range(event.start, event.stop)
        frozen = self._is_frozen(sender, part)
        others = [push.who for push in self.ledger.taken() if push.who != sender]
        if event.replaces and others:
            why = f"{others[0]} trains them too: only one replica alone may"
            return [Send(sender, membership.Refused(f"the script has written to its parameters, and {why}"))]
        # only the first values initialise a range: messages of a dead replica may come after its successor's
        if payload is not None and (part in self._blank or event.replaces):
            self._blank.discard(part)
            self.held.fill(payload, frozen)
        return [Send(sender, initialising.Initialised(self.version))]

    def _push(self, sender: str, event: pushing.Push, payload: Payload | None) -> list[Effect]:
        # Check first that the push can be applied; then the ledger judges whether it is new. A new push is applied,
        # gathered or held, as the policy decides. One that comes again was sent to the incarnation before, or its
        # acknowledgement was lost: it is acknowledged, and not applied.
        held_range = self._held_range or self.own  # the value of `own`, without the cost of the call
        model = self._model(held_range, sender, event, payload)
        held = held_range.slice.of(model)
        assert payload is not None
        covered = event.ranges if held_range.skips and event.ranges != held_range.covers[model] else ()
        incarnation, updates = self.version
        staleness = self._staleness(held_range, event.version, model)
        if staleness < 0:
            raise RemoteProtocolError(
                f"{sender} pushed to version {event.version.updates} of {self.role}, which is at {updates}"
            )
        taking = self.ledger.judge(sender, event.partition, event.incarnation, event.clock).taking
        if taking is REFUSE:
            return []  # this incarnation of its sender has ended
        copies: list[Effect] = []
        answers: list[Effect] = []
        if taking is APPLY:
            self._latest[sender] = event.version.updates, staleness
            floor, factor = self.policy.floor, held_range.rate(self.samples) * event.rate
            if self._policy_decides:
                key = Key(sender, event.incarnation, event.clock)
                if len(held_range.parts) > 1 and (why := self.policy.turn(key, event.tick, model, event.steps > 0)):
                    return [Send(sender, membership.Refused(why))]
                if event.weight and isinstance(self.policy, Rounds):
                    self.policy.weigh(key, event.weight)
                verdict = self.policy.push(key, event.tick, event.samples, staleness)
                if verdict.action is HOLD:
                    self._pushes[key] = event, payload
                    return self._settle()
                if verdict.action is GATHER:
                    scale = verdict.scale * event.rate
                    held.gather(sender, event.slot, payload, scale, average=False, covered=covered)
                    self.count_push(staleness)
                    version = Version(incarnation, updates + 1)  # this push counts as part of the next update
                    copies = self._copy(GATHERED, sender, event, payload, staleness, scale)
                    return [*copies, *self.mirror.after([acknowledgement(sender, event, version)]), *self._settle()]
                factor *= verdict.scale
            period = self.policy.taking_part if held_range.has_period else 0
            held.set_options(held_range.period(period) or event.options)
            held.apply(sender, event.slot, payload, factor, covered)
            self.count_push(staleness)
            self.count_update(event.samples, model)
            copies = self._copy(APPLIED, sender, event, payload, staleness, factor, period)
            if self.policy.floor > floor:
                answers = self.let_go()
        elif self._is_held(Key(sender, event.incarnation, event.clock)):
            return []  # a held push is acknowledged once it is in an update
        else:
            # from this, a shard that replaces another learns the replica's tick
            self.policy.applied(sender, event.tick)
            answers = self.let_go()
        dropped = taking is ACKNOWLEDGE and self.ledger.dropped(sender, event.incarnation, event.clock)
        return [*copies, *self.mirror.after([acknowledgement(sender, event, self.version, dropped)]), *answers]

    def _is_held(self, key: Key) -> bool:
        return key in self._pushes or (self._pending is not None and self._pending.has(key))

    def _model(self, held_range: HeldRange, sender: str, event: pushing.Push, payload: Payload | None) -> int:
        """Return the model of a push; refuse one that this shard cannot apply."""
        model, parts = 0, held_range.parts
        if len(parts) > 1 and (whole := Range(event.start, event.stop)) in parts:
            model = parts.index(whole)
        part = parts[model]
        if event.start != part.start or event.stop != part.stop or payload is None:
            raise RemoteProtocolError(
                f"{sender} pushed [{event.start}, {event.stop}) to {self.role}, which holds [{part.start}, {part.stop})"
            )
        if event.encoding not in pushing.ENCODINGS:
            raise RemoteProtocolError(
                f"{sender} pushed in encoding {event.encoding[:80]!r}, which {self.role} does not know: it knows "
                f"{', '.join(pushing.ENCODINGS)}; install the same distbelief everywhere"
            )
        if event.partition != roles.partition_of(sender):
            raise RemoteProtocolError(f"{sender} pushed for partition {event.partition}, but is another")
        if event.ranges != held_range.covers[model] and not _covers_part(event.ranges, part):
            covered = ", ".join(f"[{some.start}, {some.stop})" for some in event.ranges[:3])
            raise RemoteProtocolError(
                f"{sender} pushed to {self.role} what covers {covered or 'nothing'}; it holds "
                f"[{part.start}, {part.stop})"
            )
        if event.options:
            self._check_options(held_range, sender, event, model)
        if not 0 <= event.samples <= SAMPLES_LIMIT or not 0.0 <= event.rate < math.inf:
            raise RemoteProtocolError(
                f"{sender} pushed the gradient of {event.samples} samples, at {event.rate} times the learning rate"
            )
        return model

    def _check_options(self, held_range: HeldRange, sender: str, event: pushing.Push, model: int) -> None:
        known = optimizers.numbers_of(held_range.plan.optimizer(model))
        most = len(known) * len(held_range.plan.layout.groups)
        for option in event.options:
            fits = known.get(option.name, 0) == len(option.values) and all(
                0.0 <= value < math.inf for value in option.values
            )
            if not fits or len(event.options) > most:
                raise RemoteProtocolError(
                    f"{sender} sets {option.name[:80]!r} to {option.values[:9]}: the optimizer of {self.role} has "
                    f"{', '.join(f'{count} of {name}' for name, count in known.items())}"
                )

    def _copy(
        self,
        use: mirroring.CopyUse,
        sender: str,
        event: pushing.Push,
        payload: Payload,
        staleness: int,
        factor: float,
        period: int = 0,
    ) -> list[Effect]:
        """Have the standby, if any, repeat what was done with a push."""
        if self.mirror.place is None:
            return []
        keys, floor = (push_taken(sender, event),), self.policy.floor
        copied = mirroring.Copied(
            0, 0, payload.nbytes, 0, 0, use, keys, (staleness,), event.samples, factor, floor=floor, period=period
        )
        return self.mirror.copy(copied, payload)

    def _staleness(self, held_range: HeldRange, version: Version, model: int) -> int:
        """Count the updates of a model since a version."""
        # An earlier incarnation may have made more updates than the checkpoint from which this one began. Those are
        # lost, and numbers beyond `_began` now count other updates, which no earlier version has.
        (before, based), (incarnation, updates) = version, self.version
        since = updates - (based if before == incarnation else min(based, self._began))
        if len(held_range.parts) == 1 or since <= 0:
            return since
        return sum(stepped == model for stepped in islice(reversed(self._stepped), since))

    def count_push(self, staleness: int) -> None:
        """Count a push of some staleness."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1

    def count_update(self, samples: int, model: int = 0) -> None:
        """Count an update of a model with so many samples."""
        incarnation, updates = self.version
        self.version = Version(incarnation, updates + 1)
        self.samples += samples
        if self.policy.models > 1:
            self._stepped.append(model)

    def _fetch(self, sender: str, event: pushing.Fetch, payload: Payload | None) -> list[Effect]:
        start, stop = event.start, event.stop
        part = Range(start, stop)
        frozen = self._is_frozen(sender, part)
        if self.sums is not None and sender == roles.EVALUATOR and not frozen:
            answer = pushing.Fetched(event.slot, start, stop, self.version, number=event.number)
            return [Send(sender, answer, self.sums.measured(self))]
        if self._policy_decides and not frozen and not self.may_fetch(sender, event.tick):
            held_back = self._fetches.get((sender, start, event.slot))
            if held_back is not None and held_back.incarnation == event.incarnation:  # each fetch is answered once
                raise RemoteProtocolError(
                    f"{sender} fetches [{start}, {stop}) of {self.role} again, while its first fetch waits"
                )
            self._fetches[sender, start, event.slot] = event
            return []
        held_range = self._held_range or self.own
        if frozen:
            values = held_range.slice.frozen()
        elif part == held_range.moving:
            values = held_range.slice.moving()
        else:
            values = held_range.slice.of(held_range.parts.index(part)).moving()
        # no copy: an answer's bytes must stay unchanged only until the next event
        answer = pushing.Fetched(event.slot, start, stop, self.version, self._floor, event.number, self.samples)
        return [Send(sender, answer, values)]

    def may_take(self, who: str, message: messages.Message) -> bool:
        """Return whether a replica's message can be acted on now; called again after each change."""
        if type(message) is pushing.Push:
            return not self._policy_decides or self.policy.may_push(who)
        return type(message) is not pushing.Fetch or self.may_fetch(who, message.tick)

    def may_fetch(self, who: str, tick: int) -> bool:
        """Return whether a step may begin with the parameters as they are."""
        # A pending update is in the policy's floor and not in the parameters. And no replica learns a floor that the
        # standby has not confirmed: after a takeover the standby would be behind the replica's parameters.
        return (
            self._pending is None
            and self.mirror.covers(self.policy.floor)
            and self.policy.fetch(who, tick).action is ANSWER
        )

    def _settle(self, short: bool = False) -> list[Effect]:
        """Make the updates that are due, and answer the fetches that waited for them."""
        effects: list[Effect] = []
        if isinstance(self.policy, Rounds):
            for who, tick in self.policy.admitted():
                effects += self.mirror.after([Send(who, attendance.Admitted(tick))])
            # a ruling binds all shards and must survive this one: the standby has it before any follower
            for ruling in self.policy.untold():
                effects += self.mirror.tell(ruling=ruling)
                effects += self.mirror.after([Send(role, ruling) for role in self._followers])
        updates: list[Effect] = []
        while self._pending is None and (due := self.policy.due(short)) is not None:
            updates += self._drop(due) if isinstance(due, Drop) else self._update(due)
        # rounds without an update here: the shards that made one wait for this one's norms
        effects += self._held_range.exchange.pass_over(self._floor) if self._held_range else []
        return effects + updates + self.let_go() if updates else effects + self.mirror.tell_floor(self._floor)

    @property
    def _floor(self) -> int:
        """Floor of the policy, without the round of a pending update."""
        return self.policy.floor - (self._pending is not None)

    def _update(self, due: PlannedUpdate) -> list[Effect]:
        """Begin an update, and make it unless it needs norms of other shards."""
        held_range, part = self.own, self.held.of(due.model)
        held = [(key, weight, *self._pushes.pop(key)) for key, weight in due.parts]
        stalenesses = tuple(self._staleness(held_range, push.version, due.model) for _, _, push, _ in held)
        for (key, weight, push, payload), staleness in zip(held, stalenesses, strict=True):
            covered = push.ranges if held_range.skips and push.ranges != held_range.covers[due.model] else ()
            part.gather(key.who, push.slot, payload, weight, average=True, covered=covered)
            self.count_push(staleness)
        factor = held_range.rate(self.samples) * mean_rate([push for _, _, push, _ in held])
        self._pending = PendingUpdate(due, factor, [(key, push) for key, _, push, _ in held], stalenesses)
        exchange = held_range.exchange
        norms = exchange.say(self._floor, part.squares()) if exchange.takes_part else []
        return norms + self._finish()

    def _finish(self) -> list[Effect]:
        """Make the pending update, once its norms are known."""
        update, held_range = self._pending, self.own
        norms = held_range.exchange.whole(self._floor) if held_range.exchange.takes_part else ()
        if update is None or norms is None:
            return []
        self._pending, part = None, held_range.slice.of(update.due.model)
        # before the step, which scales the sum in place
        copies = update.mirrored(self.mirror, part, self.policy.floor, norms)
        part.set_options(update.pushes[0][1].options if update.pushes else ())
        part.step(update.factor, update.due.weight, norms)
        self.count_update(update.due.samples, update.due.model)
        return copies + self.mirror.after(update.acknowledged(self.version))

    def _take_norms(self, sender: str, event: agreement.Norms, payload: Payload | None) -> list[Effect]:
        effects = [*self.own.exchange.take(sender, event), *self._finish()]
        if self._pending is None:
            effects += self._settle() + self.let_go()
            later, self._later = self._later, []
            effects += [effect for asker, request in later for effect in self.handle(asker, request, None)]
        return effects

    def _drop(self, due: Drop) -> list[Effect]:
        push, _ = self._pushes.pop(due.key)
        self.ledger.drop(*due.key)
        return self.mirror.tell(dropped=push_taken(due.key.who, push)) + self.mirror.after(
            [acknowledgement(due.key.who, push, self.version, dropped=True)]
        )

    def let_go(self) -> list[Effect]:
        """Answer the held fetches that the policy allows now."""
        effects = self.mirror.tell_floor(self._floor)
        for (who, start, slot), event in list(self._fetches.items()):
            if self.may_fetch(who, event.tick):
                del self._fetches[who, start, slot]
                effects += self._fetch(who, event, None)
        return effects

    # members

    def _attend(self, sender: str, event: attendance.Attend, payload: Payload | None) -> list[Effect]:
        tick = self.policy.attend(sender, event.incarnation, event.tick, event.epoch)
        answer = self.mirror.after([Send(sender, attendance.Admitted(tick))] if event.tick < 0 <= tick else [])
        return answer + self._settle() + self.let_go()

    def _return(self, sender: str, event: attendance.Return, payload: Payload | None) -> list[Effect]:
        # acknowledged pushes do not come again: those that the checkpoint lacks are lost, and recorded
        lost = self.ledger.resume(sender, event.partition, event.incarnation, event.clock)
        first = event.clock - lost + 1
        return (
            [WriteRecord(records.Forgotten(self.role, sender, event.incarnation, first, event.clock))] if lost else []
        )

    def _sit_out(self, sender: str, event: attendance.SitOut, payload: Payload | None) -> list[Effect]:
        self.policy.rest(sender, event.incarnation, event.epoch)
        return [*self._settle(), *self.let_go(), Send(sender, attendance.Excused())]

    def _departed(self, sender: str, event: attendance.Departed, payload: Payload | None) -> list[Effect]:
        effects = self._without(event.who, event.incarnation)
        # from now on no ruling takes its pushes: only now may the coordinator deal its minibatches to others
        rules = isinstance(self.policy, Rounds) and self.index == self.own.plan.ruler
        return effects + (self.mirror.after([Send(roles.COORDINATOR, event)]) if rules else [])

    def _without(self, who: str, incarnation: int) -> list[Effect]:
        self._forget_fetches(who, incarnation)
        self.policy.leave(who, incarnation)
        return self._settle() + self.let_go()

    def _forget_fetches(self, who: str, incarnation: int) -> None:
        """Drop the held fetches of an incarnation that is over, and of earlier ones."""
        self._fetches = {
            key: event for key, event in self._fetches.items() if key[0] != who or 0 <= incarnation < event.incarnation
        }

    # the standby

    def _begin_mirror(self, sender: str, event: mirroring.BeginMirroring, payload: Payload | None) -> list[Effect]:
        """Send a standby the whole state, and from now on each change."""
        # Gathered pushes make an update first, since sums are no part of the state. A held push is in the ledger, but
        # not sent: the standby's ledger ends with the push before, so that after a takeover it takes the held one when
        # that comes again.
        updates = self._settle(short=True)
        rulings = tuple(self.policy.history.since(0)) if isinstance(self.policy, Rounds) else ()
        applied = {push[:2]: push for push in self.ledger.taken()}
        for key, (push, _) in self._pushes.items():
            before = push_taken(key.who, push)._replace(clock=key.clock - 1)
            applied[before[:2]] = min(applied[before[:2]], before)
        incarnation, count = self.version
        arrays, summing, beside = self.sums.state(self) if self.sums else (self.held.arrays(), None, ())
        whole = mirroring.StateSent(
            incarnation,
            0,
            count,
            self.samples,
            dict(self.staleness),
            tuple(applied.values()),
            self.policy.floor,
            rulings,
            self.own.exchange.known(),
            summing,
        )
        return [*updates, *self.mirror.begin(event.place, arrays, whole, beside)]

    def _confirmed(self, sender: str, event: mirroring.Confirmed, payload: Payload | None) -> list[Effect]:
        effects, whole = self.mirror.kept(event)
        mirrored: list[Effect] = [Send(roles.COORDINATOR, mirroring.Mirrored(event.incarnation))] if whole else []
        return mirrored + effects + self.let_go()

    def _unmirrored(self, sender: str, event: mirroring.Unmirrored, payload: Payload | None) -> list[Effect]:
        if self.mirror.place is None or self.mirror.place.incarnation != event.incarnation:
            return []
        return self.mirror.end() + self.let_go()

    # rounds

    def _follow(self, sender: str, event: agreement.Follow, payload: Payload | None) -> list[Effect]:
        self._followers[sender] = event.round
        return self._tell_rulings(sender)

    def _tell_rulings(self, follower: str) -> list[Effect]:
        """Send a shard the rulings that it may have missed."""
        rulings = self.policy.history.since(self._followers[follower]) if isinstance(self.policy, Rounds) else []
        return self.mirror.after([Send(follower, ruling) for ruling in rulings])

    def _rule(self, sender: str, event: agreement.Ruling, payload: Payload | None) -> list[Effect]:
        held_range = self._held_range
        if not isinstance(self.policy, Rounds) or held_range is None or sender != roles.shard(held_range.plan.ruler):
            raise RemoteProtocolError(f"{sender} sent a ruling, and is not the shard that rules this job")
        self.policy.rule(event.at_partition(held_range.partition))
        # a round whose members are all gone makes no update, but fetches that waited for it are answered
        return self._settle() + self.let_go()

    def _snapshot(self, sender: str, event: checkpointing.Snapshot, payload: Payload | None) -> list[Effect]:
        updates = self._settle(short=True)  # what was acknowledged is in the parameters that are saved
        facts = {
            "updates": self.version.updates,
            "samples": self.samples,
            "staleness": {str(staleness): count for staleness, count in self.staleness.items()},
            "taken": self.ledger.taken(),
        }
        return [*updates, Save(event.number, f"shard-{self.index}", self.held.arrays(), facts)]

    def _lost(self, sender: str, event: events.Lost, payload: Payload | None) -> list[Effect]:
        if roles.is_replica(sender) and self._held_range is not None:
            return self._without(sender, event.incarnation)
        if sender == roles.EVALUATOR:
            self._forget_fetches(sender, event.incarnation)
            return []
        # The link may break while the standby lives, and the coordinator may let it take over. So no push that it may
        # lack is acknowledged, until the coordinator sends `Unmirrored`.
        place = self.mirror.place
        if sender == self.mirror.standby and place is not None and event.incarnation in (-1, place.incarnation):
            return [Send(roles.COORDINATOR, mirroring.StandbyLost(place.incarnation))]
        return [End("the coordinator is gone")] if sender == roles.COORDINATOR else []

    def waiting(self) -> dict[str, str]:
        """Return for each replica with a held push or fetch why it waits."""
        slowest = f": waits for {roles.named(self.policy.slowest())}" if self.policy.slowest() else ""
        reasons = {}
        for (who, _, _), event in self._fetches.items():
            verdict = self.policy.fetch(who, event.tick)
            # where the policy would answer, the fetch can only wait for the standby
            behind = verdict.action is ANSWER
            reasons[who] = "the standby has not confirmed the latest round" if behind else verdict.reason + slowest
        return reasons | {key.who: self.policy.why(key) + slowest for key in self._pushes}

    def waits(self) -> str:
        if self._held_range is None:
            return "to be told its range"
        return "to be sent its first parameters" if self._blank else ""

    def account(self) -> records.Applied:
        """Return the account of all that it has applied."""
        return records.Applied(self.role, self.version.updates, self.samples, dict(self.staleness))

    def standing(self) -> dict[str, object]:
        rows: dict[str, dict[str, object]] = {push.who: {"clock": push.clock} for push in self.ledger.taken()}
        for role, (version, staleness) in self._latest.items():
            rows[role] |= {"version": version, "staleness": staleness}
        for role, reason in self.waiting().items():
            rows.setdefault(role, {})["waits_for"] = reason
        return {"version": self.version.updates, "of": rows}

    @property
    def own(self) -> HeldRange:
        """Its range; raises `RemoteProtocolError` where it has none yet."""
        if self._held_range is None:
            raise RemoteProtocolError(f"{self.role} has no range yet")
        return self._held_range

    @property
    def held(self) -> Slice:
        """Its slice; raises as `own` does."""
        return self.own.slice

    def _is_frozen(self, sender: str, part: Range) -> bool:
        """Return whether a range is the frozen one; refuse one that this shard does not hold."""
        held_range = self._held_range
        if held_range is None or part not in held_range.ranges:
            raise RemoteProtocolError(
                f"{sender} names [{part.start}, {part.stop}), which is not what {self.role} holds"
            )
        return part == held_range.frozen and part != held_range.moving
