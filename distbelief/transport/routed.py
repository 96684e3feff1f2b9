"""Virtual network over a topology: messages between hosts share the bandwidth of the cables on their route.

A link between two roles is one flow. Its messages leave one after another, at the flow's fair share of bandwidth. They
arrive after the latencies of the cables (cut-through: a switch forwards a message before its end has come). A message
that fits a packet takes no share from others. Two roles of one host use its memory.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from distbelief.core import roles
from distbelief.core.effects import Arrival
from distbelief.core.settings import Settings
from distbelief.network.graph import Route, Routes, spread
from distbelief.network.shares import FairShares, Flow
from distbelief.schedules.price import LinkModel
from distbelief.transport.cluster_model import Hosts, NetworkModel, SimulatorClock
from distbelief.transport.virtual import HEADER, MEMORY, VirtualEndpoint, VirtualLink, VirtualNetwork

PACKET = 1500
"""Most bytes of a message that takes no share of bandwidth."""


class RoleFlow(Flow):
    """Messages of one role to another over a route: `latency` of all cables, `packet` seconds for each byte."""

    __slots__ = ("ends", "latency", "link", "packet", "queue", "sent")

    def __init__(self, links: Route, link: VirtualLink, latency: float, packet: float) -> None:
        super().__init__(links)
        self.link, self.latency, self.packet = link, latency, packet
        self.queue: deque[tuple[int, tuple[VirtualLink, Arrival]]] = deque()
        """Messages that have not left, with the bytes of each; the first is leaving."""
        self.ends = ""
        """Reason for the end of the link, delivered to the receiver after the last message; "" before."""
        self.sent = 0
        """Bytes of all messages."""


class RoutedNetwork(VirtualNetwork):
    """Virtual network over a topology.

    A single switch behaves like no topology, since the latency is that of two cables.
    """

    def __init__(
        self,
        clock: SimulatorClock,
        model: NetworkModel,
        settings: Settings,
        phantom: bool,
        hosts: Hosts | None,
        routed: tuple[Routes, Sequence[int]],
    ) -> None:
        super().__init__(clock, model, settings, phantom, hosts)
        self.inside = LinkModel(model.local_latency or MEMORY.latency, model.local_bandwidth or MEMORY.bandwidth)
        self.shares = self.inside.bandwidth == math.inf
        self.routes, self.places = routed
        self.per_host = (hosts.replicas or settings.replicas) if hosts else settings.strategy.host_replicas or 1
        topology = self.routes.topology
        self._switches = [topology.switch_of(place) for place in self.places]
        self._spread = spread(self._switches)
        self.capacities = [topology.bandwidth(link, model.bandwidth) for link in range(2 * len(topology.cables))]
        self.fair = FairShares(clock, self.capacities, self._passed)
        self.flows: dict[VirtualLink, RoleFlow] = {}
        """Flow of each link so far."""

    def endpoint(self, role: str, incarnation: int = 0) -> VirtualEndpoint:
        endpoint = self.endpoints[role] = RoutedEndpoint(role, self, incarnation)
        return endpoint

    def host_of(self, role: str) -> int:
        """Return the number of a role's host.

        Shards are spread over switches, and a standby is on another switch than its shard if there is one.
        """
        parsed = roles.parse(role)
        if parsed.kind is roles.Kind.REPLICA:
            return parsed.index // self.per_host
        if parsed.kind not in (roles.Kind.SHARD, roles.Kind.STANDBY):
            return 0
        first = parsed.index % len(self._spread)
        shard, *others = self._spread[first:] + self._spread[:first]
        if parsed.kind is roles.Kind.SHARD:
            return shard
        return next((host for host in others if self._switches[host] != self._switches[shard]), others[0])

    def flow(self, link: VirtualLink) -> RoleFlow:
        """Make the flow of a link between hosts."""
        route = self.routes.of(self.places[link.sender.host], self.places[link.peer.host])
        packet = 1 / min(self.capacities[number] for number in route)
        flow = self.flows[link] = RoleFlow(route, link, self.model.latency * len(route) / 2, packet)
        return flow

    def _passed(self, flow: RoleFlow) -> int:
        """Have the first message of a flow arrive; return the bytes of the next."""
        queue = flow.queue
        self.arrive(flow, queue.popleft()[1])
        if queue:
            return queue[0][0]
        if flow.ends:
            flow.link.peer._hear_of_end(flow.link.sender, flow.ends, flow.link.last)
        return 0

    def arrive(self, flow: RoleFlow, what: tuple[VirtualLink, Arrival], takes: float = 0.0) -> None:
        """Have a message arrive that takes `takes` seconds to leave its host."""
        link, arrival = what
        clock, peer = self.clock, link.peer
        arrives = clock.time + takes + flow.latency
        if not self.plain:
            link.sender.port.leaves = clock.time + takes
            arrives = self.delay(link, arrival, arrives, takes, flow.latency)
        link.last = arrives = arrives if arrives > link.last else link.last
        clock.call_at(arrives, peer.take, what, peer.arriving)

    def link_loads(self) -> dict[int, Counter[tuple[str, str]]]:
        """Return the bytes that each directed link has carried, by sender and receiver."""
        sent: dict[int, Counter[tuple[str, str]]] = {}
        for flow in self.flows.values():
            for link in flow.links:
                sent.setdefault(link, Counter())[flow.link.sender.role, flow.link.peer.role] += flow.sent
        return sent


class RoutedEndpoint(VirtualEndpoint):
    """One role's end of a routed network."""

    network: RoutedNetwork

    def _leave(self, what: tuple[VirtualLink, Arrival]) -> None:
        """Send a message, after the earlier ones of its flow, once the work for it is done."""
        link, arrival = what
        if self.host == link.peer.host:
            super()._leave(what)
            return
        network = self.network
        network.before_send(self.role, link.peer.role, arrival.event)  # type: ignore[arg-type]  # a message was sent
        if self.ended or link.gone:
            return
        flow, payload = network.flows.get(link) or network.flow(link), arrival.payload
        size = HEADER if payload is None else HEADER + payload.nbytes
        self._count(link.peer, arrival.event, payload, shares=False)  # type: ignore[arg-type]  # as above
        flow.sent += size
        link.last = max(link.last, 0.0)  # marks that a message is on its way, though its arrival is not known yet

        # order is kept: a short message waits behind a long one of its flow
        if flow.queue:
            flow.queue.append((size, what))
        elif size <= PACKET:
            network.arrive(flow, what, size * flow.packet)
        else:
            flow.queue.append((size, what))
            network.fair.begin(flow, size)

    def _hear_of_end(self, peer: VirtualEndpoint, reason: str, after: float) -> None:
        """Lose a peer that has ended its link, after all that it has sent."""
        theirs = peer.links.get(self.role)
        flow = self.network.flows.get(theirs) if theirs else None
        if flow is not None and flow.queue:
            flow.ends = reason
        else:
            super()._hear_of_end(peer, reason, after)
