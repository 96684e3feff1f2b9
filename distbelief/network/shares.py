"""Max-min fair shares of links, for flows that pass at the same time.

No flow can be given more without taking from one that has no more than it. So each flow is held by one full link, and
those that a link holds have equal parts of what the other flows on it leave. A link therefore counts what it has given
to *each* that it holds, and knows when the next of them is done, however many they are.

A flow that begins or ends changes the parts on its own links at once. The parts on all other links are made anew at
once among few flows, and a little later among many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol

from distbelief.network.routes import Route

FEW = 8
"""Among so many flows all parts are made anew at once, among more `LATE` times a flow's usual duration later."""
LATE = 1 / 4
RECENT = 1 / 16
"""Weight of the latest flow in the usual duration."""
EXACT = 0.01
"""Bytes that count as none: sums are rounded."""


class FlowClock(Protocol):
    """The clock of a simulation."""

    time: float

    def call_at(self, moment: float, function: Callable[[Any], None], argument: Any) -> None:
        """Call a function at a moment."""


class Flow:
    """Bytes that pass some links, piece after piece."""

    __slots__ = ("began", "done", "held_by", "links", "narrowest", "part", "settled")

    def __init__(self, links: Route) -> None:
        self.links = links
        self.held_by: MeteredLink | None = None
        self.narrowest: MeteredLink | None = None
        self.began = self.done = self.part = 0.0
        """When it began; what the link that holds it has given to each when its piece is done; bytes per second."""
        self.settled = 0


class MeteredLink:
    """One directed link, of so many bytes per second."""

    __slots__ = ("capacity", "coming", "elsewhere", "flows", "given", "holds", "planned", "rate", "since")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, None] = {}
        self.holds, self.elsewhere = 0, 0.0
        """The number of these that it holds; what the others have, which counts only where it holds any."""
        self.rate = self.given = self.since = 0.0
        """Bytes per second of each that it holds; bytes that it has given to each until the moment `since`."""
        self.coming: list[tuple[float, int, Flow]] = []
        """A heap of flows by what is given when their piece is done, also of some that it holds no more."""
        self.planned = math.inf

    def settle(self, now: float) -> None:
        """Give what is due until now."""
        self.given += self.rate * (now - self.since)
        self.since = now

    def first(self) -> tuple[float, int, Flow]:
        """The flow whose piece is done first, of those that it holds."""
        coming = self.coming
        while coming[0][2].held_by is not self or coming[0][2].done != coming[0][0]:
            heappop(coming)
        return coming[0]


class FairShares:
    """The shares of all flows.

    Args:
        clock: of the simulation.
        capacities: of all links, in bytes per second.
        passed: called with a flow whose piece has passed; returns the bytes of its next, 0 where there is none.
    """

    def __init__(self, clock: FlowClock, capacities: Sequence[float], passed: Callable[[Any], float]) -> None:
        self._clock, self._passed = clock, passed
        self._links = [MeteredLink(capacity) for capacity in capacities]
        self._uneven = len({*capacities}) > 1
        self._used: dict[MeteredLink, None] = {}
        """Links that a flow takes, or took when all parts were made anew."""
        self._count = self._order = self._round = 0
        self._shared_at, self._usual = math.inf, 0.0

    def begin(self, flow: Flow, size: float) -> None:
        """Let a flow begin."""
        now, least, holder, meets = self._clock.time, math.inf, self._links[flow.links[0]], False
        for number in flow.links:
            link = self._links[number]
            part, flows = link.capacity, link.flows
            if flows:
                meets = True
                part /= len(flows) + 1
                if link.holds and (more := (link.capacity - link.elsewhere) / (link.holds + 1)) > part:
                    part = more
            else:
                self._used[link] = None
            if part < least:
                least, holder = part, link
        flow.held_by, flow.began, flow.part = holder, now, least
        if flow.narrowest is None:
            flow.narrowest = min([self._links[number] for number in flow.links], key=lambda link: link.capacity)
        if not holder.holds:
            holder.elsewhere, holder.since = sum([other.part for other in holder.flows]), now
        holder.holds += 1
        holder.settle(now)
        self._come(flow, holder, size)
        for number in flow.links:
            link = self._links[number]
            link.flows[flow] = None
            if link is not holder:
                link.elsewhere += least
            if link.holds:
                self._rate(link, now)
        self._count += 1
        if meets:
            self._share_soon(now)

    def _come(self, flow: Flow, link: MeteredLink, size: float) -> None:
        self._order += 1
        flow.done = link.given + size
        heappush(link.coming, (flow.done, self._order, flow))

    def _end(self, flow: Flow, now: float) -> None:
        holder, flow.held_by, meets = flow.held_by, None, False
        for number in flow.links:
            link = self._links[number]
            del link.flows[flow]
            if link is holder:
                link.holds -= 1
            else:
                link.elsewhere -= flow.part
            if link.flows:
                meets = True
                if link.holds:
                    self._rate(link, now)
        self._count -= 1
        self._usual += (now - flow.began - self._usual) * RECENT
        if meets:
            self._share_soon(now)

    def _rate(self, link: MeteredLink, now: float) -> None:
        """Part a link anew among those that it holds: at least evenly, since what others have may have changed."""
        link.given += link.rate * (now - link.since)
        link.since = now
        part, least = (link.capacity - link.elsewhere) / link.holds, link.capacity / len(link.flows)
        link.rate = part if part > least else least
        self._plan(link, now)

    def _plan(self, link: MeteredLink, now: float) -> None:
        """Look at a link when the next is done there; where it is looked at before, then again."""
        due = max(now, now + (link.first()[0] - link.given) / link.rate)
        if due < link.planned:
            link.planned = due
            self._clock.call_at(due, self._look, (link, due))

    def _look(self, planned: tuple[MeteredLink, float]) -> None:
        link, moment = planned
        if moment != link.planned:
            return
        link.planned = math.inf
        link.settle(moment)
        while link.holds:
            done, _, flow = link.first()
            left = done - link.given
            if left > EXACT and moment + left / link.rate > moment:  # late in a job a clock cannot tell so little
                self._plan(link, moment)
                return
            heappop(link.coming)
            if size := self._passed(flow):
                self._come(flow, link, size)
            else:
                self._end(flow, moment)
        link.coming.clear()
        link.rate = 0.0

    def _share_soon(self, now: float) -> None:
        """Make all parts anew, since a flow has begun or ended that met others."""
        moment = now + (self._usual * LATE if self._count > FEW else 0.0)
        if moment < self._shared_at:
            self._shared_at = moment
            self._clock.call_at(moment, self._share, moment)

    def _share(self, now: float) -> None:
        """Make all parts anew. The link with the least for each of its flows is full, and holds those. What they leave
        of other links is for the others there, which is never less for each than before.
        """
        if now != self._shared_at:
            return
        self._shared_at, self._round = math.inf, self._round + 1
        settled, heap, single = self._round, list[tuple[float, int, MeteredLink]](), list[MeteredLink]()
        self._used = {link: None for link in self._used if link.flows}
        for order, link in enumerate(self._used):
            if link.holds:
                link.settle(now)
                link.holds = 0
            link.since = now
            if len(link.flows) > 1:
                heap.append((link.capacity / len(link.flows), order, link))
            else:
                single.append(link)
        heapify(heap)
        while heap:
            level, order, link = heap[0]
            room, free = link.capacity, list[Flow]()
            for flow in link.flows:
                if flow.settled == settled:
                    room -= flow.part
                else:
                    free.append(flow)
            if free and (part := room / len(free)) > level:
                heapreplace(heap, (part, order, link))
            elif self._uneven and (slow := [f for f in free if f.narrowest and f.narrowest.capacity < level]):
                self._hold_alone(slow, now)
            else:
                heappop(heap)
                if free:
                    self._hold(link, free, room, now)
        self._hold_alone([flow for link in single for flow in link.flows if flow.settled != settled], now)

    def _hold_alone(self, flows: Sequence[Flow], now: float) -> None:
        """Each has all of its narrowest link, where nobody else is."""
        for flow in dict.fromkeys(flows):
            if (link := flow.narrowest) is not None:
                self._hold(link, [flow], link.capacity, now)

    def _hold(self, link: MeteredLink, flows: list[Flow], room: float, now: float) -> None:
        """A link holds those flows, which have so much of it."""
        link.holds, link.elsewhere = len(flows), link.capacity - room
        link.rate = part = room / len(flows)
        for flow in flows:
            flow.settled, flow.part = self._round, part
            if (before := flow.held_by) is not link:
                assert before is not None
                flow.held_by = link
                self._come(flow, link, max(0.0, flow.done - before.given))
        self._plan(link, now)
