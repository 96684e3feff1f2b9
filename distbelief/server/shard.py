"""The shard: the machine that holds one slice of the parameters and applies what replicas push to it (section 4.1 of the paper).

A push applies whole or not at all, and at most once; between shards nothing is ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distbelief.core import events, learning_rate, messages, roles, speakers
from distbelief.core.effects import Effect, End, Load, Payload, Save, Send
from distbelief.core.events import Event
from distbelief.core.layout import Range
from distbelief.core.ledger import SAMPLES_LIMIT, Ledger
from distbelief.core.messages import Version
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.slice import Slice


class Shard:
    """One server shard.

    Args:
        index: which of the plan's assignments it holds.
        make: makes the slice, once the plan is known.
        incarnation: of this shard; stands in every version it tells.
    """

    def __init__(self, index: int, make: Callable[[Plan, int], Slice], incarnation: int = 0) -> None:
        self.index, self._make = index, make
        self.version = Version(incarnation, 0)
        self.samples = 0
        self.staleness: dict[int, int] = {}
        self.ledger = Ledger()
        self._plan: Plan | None = None
        self._slice: Slice | None = None
        self._heard: set[tuple[str, type]] = set()
        self._answers: dict[type, Callable[[str, Any, Payload | None], list[Effect]]] = {
            messages.Push: self._push,
            messages.Fetch: self._fetch,
            messages.Initialise: self._initialise,
            messages.Restore: self._restore,
            events.Loaded: self._loaded,
            messages.Snapshot: self._snapshot,
            events.Saved: self._saved,
            messages.Describe: self._describe,
            messages.Stop: self._stop,
            events.Lost: self._lost,
        }

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
        said = (sender, type(event))
        if said not in self._heard:
            speakers.check(*said)
            self._heard.add(said)
        answer = self._answers.get(said[1])
        if answer is None:
            raise RemoteProtocolError(f"a shard has no answer to {type(event).__name__}")
        return answer(sender, event, payload)

    def _restore(self, sender: str, event: messages.Restore, payload: Payload | None) -> list[Effect]:
        self._plan, self._slice = event.plan, self._make(event.plan, self.index)
        self._range, self._frozen = event.plan.assignments[self.index].moving, event.plan.assignments[self.index].frozen
        self._blank = {self._range, self._frozen}
        self._schedule, self._total = event.plan.settings.lr_schedule, event.plan.total_samples
        if event.checkpoint:
            return [Load(event.checkpoint, event.plan, self.index)]
        return [Send(roles.COORDINATOR, messages.Restored(loaded=False))]

    def _loaded(self, sender: str, event: events.Loaded, payload: Payload | None) -> list[Effect]:
        self.held.load(event.arrays)
        self._blank.clear()
        self.version = Version(self.version.incarnation, event.facts["updates"])
        self.samples = event.facts["samples"]
        self.staleness = {int(staleness): count for staleness, count in event.facts["staleness"].items()}
        return [Send(roles.COORDINATOR, messages.Restored(loaded=True))]

    def _initialise(self, sender: str, event: messages.Initialise, payload: Payload | None) -> list[Effect]:
        frozen = self._which(sender, event.start, event.stop)
        asked = Range(event.start, event.stop)
        # the first who initialises a range does: one who died doing it may be heard after its successor
        if payload is not None and asked in self._blank:
            self._blank.discard(asked)
            self.held.fill(payload, frozen)
        return [Send(sender, messages.Initialised(self.version))]

    def _push(self, sender: str, event: messages.Push, payload: Payload | None) -> list[Effect]:
        held, own = self.held, self._range
        if event.start != own.start or event.stop != own.stop or payload is None:
            raise RemoteProtocolError(f"{sender} pushed [{event.start}, {event.stop}) to shard {self.index}, which holds [{own.start}, {own.stop})")
        if not 0 <= event.samples <= SAMPLES_LIMIT:
            raise RemoteProtocolError(f"{sender} pushed the gradient of {event.samples} samples")
        verdict = self.ledger.judge(sender, event.incarnation, event.clock)
        if verdict.action == "refuse":
            return []
        if verdict.action == "apply":
            incarnation, updates = self.version
            staleness = updates - event.version.updates
            if staleness < 0:
                raise RemoteProtocolError(f"{sender} pushed to version {event.version.updates} of shard {self.index}, which is at {updates}")
            held.apply(sender, event.slot, payload, learning_rate.factor(self._schedule, self.samples, self._total))
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
            self.samples += event.samples
            self.version = Version(incarnation, updates + 1)
        return [Send(sender, messages.Pushed(event.slot, event.clock, self.version))]

    def _fetch(self, sender: str, event: messages.Fetch, payload: Payload | None) -> list[Effect]:
        start, stop = event.start, event.stop
        held = self.held.frozen() if self._which(sender, start, stop) else self.held.moving()
        return [Send(sender, messages.Fetched(event.slot, start, stop, self.version), held)]

    def _snapshot(self, sender: str, event: messages.Snapshot, payload: Payload | None) -> list[Effect]:
        facts = {"updates": self.version.updates, "samples": self.samples, "staleness": {str(k): v for k, v in self.staleness.items()}}
        return [Save(event.number, f"shard-{self.index}", self.held.arrays(), facts)]

    def _saved(self, sender: str, event: events.Saved, payload: Payload | None) -> list[Effect]:
        return [Send(roles.COORDINATOR, messages.SnapshotDone(event.number, event.error))]

    def _describe(self, sender: str, event: messages.Describe, payload: Payload | None) -> list[Effect]:
        return [Send(sender, messages.Description(self.version, self.samples, dict(self.staleness)))]

    def _stop(self, sender: str, event: messages.Stop, payload: Payload | None) -> list[Effect]:
        return [End(event.reason)]

    def _lost(self, sender: str, event: events.Lost, payload: Payload | None) -> list[Effect]:
        return [End("the coordinator is gone")] if sender == roles.COORDINATOR else []

    @property
    def held(self) -> Slice:
        """Its slice.

        Raises:
            RemoteProtocolError: nobody has told it its range.
        """
        if self._slice is None:
            raise RemoteProtocolError(f"shard {self.index} has not been told its range yet")
        return self._slice

    def _which(self, sender: str, start: int, stop: int) -> bool:
        """Whether a range is the frozen one; it must be that or the moving one."""
        asked = Range(start, stop)
        if self._slice is None or asked not in (self._range, self._frozen):
            raise RemoteProtocolError(f"{sender} names [{start}, {stop}), which is not what shard {self.index} holds")
        return asked != self._range
