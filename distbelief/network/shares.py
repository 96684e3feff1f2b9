"""Max-min fair shares of links for simultaneous flows.

No flow can get more without taking from a flow with no larger share. So each flow is limited by one full link. The
flows that a link limits share equally what the other flows leave of its capacity. A link therefore needs one count of
the bytes given to *each* flow that it limits, which shows when the next one is done.

A flow that begins or ends changes the shares on its own links at once. The shares on other links are recomputed at once
if there are few flows, and a little later if there are many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol

from distbelief.network.graph import Route

FEW = 8
"""Most flows for which all shares are recomputed at once, instead of `LATE` times a flow's usual duration later."""
LATE = 1 / 4
RECENT = 1 / 16
"""Weight of the latest flow in the usual duration."""
EXACT = 0.01
"""Bytes that count as none, because of rounding errors."""


class FlowClock(Protocol):
    """Clock of a simulation."""

    time: float

    def call_at(self, moment: float, function: Callable[[Any], None], argument: Any) -> None:
        """Call a function at a moment."""


class Flow:
    """Bytes that pass some links, piece by piece."""

    __slots__ = ("began", "done", "held_by", "links", "narrowest", "part", "settled")

    def __init__(self, links: Route) -> None:
        self.links = links
        self.held_by: MeteredLink | None = None
        self.narrowest: MeteredLink | None = None
        self.began = self.done = self.part = 0.0
        """Start; the limiting link's count of bytes per flow at which the piece is done; bytes per second."""
        self.settled = 0


class MeteredLink:
    """One directed link with a capacity in bytes per second."""

    __slots__ = ("capacity", "coming", "elsewhere", "flows", "given", "holds", "planned", "rate", "since")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, None] = {}
        self.holds, self.elsewhere = 0, 0.0
        """Number of flows that it limits; total rate of the others, valid only if it limits any."""
        self.rate = self.given = self.since = 0.0
        """Bytes per second of each flow that it limits; bytes given to each until the moment `since`."""
        self.coming: list[tuple[float, int, Flow]] = []
        """Heap of flows by `Flow.done`; another link may limit some of them by now."""
        self.planned = math.inf

    def settle(self, now: float) -> None:
        """Count the bytes given until now."""
        self.given += self.rate * (now - self.since)
        self.since = now

    def first(self) -> tuple[float, int, Flow]:
        """Return the flow whose piece is done first, among those that this link limits."""
        coming = self.coming
        while coming[0][2].held_by is not self or coming[0][2].done != coming[0][0]:
            heappop(coming)
        return coming[0]


class FairShares:
    """Shares of all flows.

    Capacities are in bytes per second. `passed` is called with a flow whose piece has passed, and returns the bytes of
    its next piece, or 0.
    """

    def __init__(self, clock: FlowClock, capacities: Sequence[float], passed: Callable[[Any], float]) -> None:
        self._clock, self._passed = clock, passed
        self._links = [MeteredLink(capacity) for capacity in capacities]
        self._uneven = len({*capacities}) > 1
        self._used: dict[MeteredLink, None] = {}
        """Links with flows, now or when all shares were last computed."""
        self._count = self._order = self._round = 0
        self._shared_at, self._usual = math.inf, 0.0

    def begin(self, flow: Flow, size: float) -> None:
        """Begin a flow."""
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
        """Compute the share of each flow that a link limits: at least an even share, as other rates may be outdated."""
        link.given += link.rate * (now - link.since)
        link.since = now
        part, least = (link.capacity - link.elsewhere) / link.holds, link.capacity / len(link.flows)
        link.rate = part if part > least else least
        self._plan(link, now)

    def _plan(self, link: MeteredLink, now: float) -> None:
        """Schedule a check of a link at the end of its next piece, unless an earlier check is scheduled."""
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
            if left > EXACT and moment + left / link.rate > moment:  # a late clock is coarser than this time
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
        """Schedule a recomputation of all shares after a flow began or ended on a shared link."""
        moment = now + (self._usual * LATE if self._count > FEW else 0.0)
        if moment < self._shared_at:
            self._shared_at = moment
            self._clock.call_at(moment, self._share, moment)

    def _share(self, now: float) -> None:
        """Recompute all shares.

        The link with the least share per flow is full, and limits its flows. What they leave on other links goes to
        those links' other flows, whose shares do not shrink.
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
        """Give each flow all of its narrowest link, which no other flow uses."""
        for flow in dict.fromkeys(flows):
            if (link := flow.narrowest) is not None:
                self._hold(link, [flow], link.capacity, now)

    def _hold(self, link: MeteredLink, flows: list[Flow], room: float, now: float) -> None:
        """Let a link limit some flows, which share `room` of it."""
        link.holds, link.elsewhere = len(flows), link.capacity - room
        link.rate = part = room / len(flows)
        for flow in flows:
            flow.settled, flow.part = self._round, part
            if (before := flow.held_by) is not link:
                assert before is not None
                flow.held_by = link
                self._come(flow, link, max(0.0, flow.done - before.given))
        self._plan(link, now)
