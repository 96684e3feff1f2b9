"""Virtual network: all roles in one process, on simulated time, with delays, outages and crashes by a seed.

A link behaves like TCP: messages arrive in order, and are lost only with a role. Messages that leave one role share its
bandwidth, and so do those that reach it; each carries its payload and `HEADER` bytes. A message that meets an outage is
sent again when the outage ends, at the bandwidth of its own link; so is the news of a death. A link opens at once, even
across an outage; only its messages wait.

A role is one thread. A state machine gets an arrival once the work for earlier ones is done; a message leaves once the
work for it is done. A story gets what has arrived as soon as it looks; the work for it delays what the story does next.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from distbelief.core import roles, wire
from distbelief.core.effects import Arrival, Effect, Payload, Send
from distbelief.core.events import Lost
from distbelief.core.messages import Bulk, Message, SlotReply
from distbelief.core.settings import Settings
from distbelief.errors import JobFailed
from distbelief.schedules.price import LinkModel, Port, add, carry
from distbelief.sharding.layout import Range
from distbelief.transport.base import EMPTY, Arena, Endpoint, checked
from distbelief.transport.cluster_model import (
    Hosts,
    MessageCosts,
    NetworkModel,
    OwnThread,
    SimulatorClock,
    Thread,
    VirtualHost,
)

HEADER = 64
"""Bytes of a simulated message besides its payload."""
MEMORY = LinkModel(8e-6, math.inf)
"""Shared memory as a link: its latency is that of waking a process, measured by the benchmark `wire`."""


class VirtualNetwork:
    """All links of a simulated cluster, and the processors of its roles.

    Args:
        settings: of the job: the seed of jitter and delays, and the replicas on each host.
        phantom: whether payloads are only lengths, so that arenas are empty.
        hosts: machines that roles share; None gives each role its own.
    """

    def __init__(
        self,
        clock: SimulatorClock,
        model: NetworkModel | None = None,
        settings: Settings | None = None,
        phantom: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        settings = settings or Settings()
        self.clock, self.model = clock, model or NetworkModel()
        self.model.check()
        self._unsteady = bool(self.model.jitter or self.model.delay_chance)
        self.outages = [
            (cut.start, cut.stop, frozenset(cut.side)) for cut in sorted(self.model.outages, key=lambda cut: cut.start)
        ]
        self.plain = not (self._unsteady or self.outages or self.model.reduction)
        """True if only the line and the two ports delay a message."""
        self.chance = random.Random(settings.seed)
        self.phantom = phantom
        usual = LinkModel(self.model.latency, self.model.bandwidth)
        base = MEMORY if hosts else usual
        inside = LinkModel(self.model.local_latency or base.latency, self.model.local_bandwidth or base.bandwidth)
        self._per_host, self._hosts, self._replicas = settings.strategy.host_replicas, hosts, settings.replicas
        self.inside = inside if (self._per_host or hosts) and inside != usual else None
        """Model of links inside a host; None if it is that of all links."""
        self.shares = self.inside is not None and self.inside.bandwidth == math.inf
        """True if links inside a host are shared memory."""
        self._machines: dict[int, VirtualHost] = {}
        self.endpoints: dict[str, VirtualEndpoint] = {}
        self.before_send: Callable[[str, str, Message], None] = _nothing
        """Function called with sender, receiver and message before each message leaves; it injects faults."""
        self.watch: Callable[[str, str, Message], None] = _nothing
        """Function called with sender, receiver and message when each message is delivered, for checkers."""
        self.adds: Callable[[Message], bool] = lambda _: False
        """Function that returns whether a message's bytes are added to others on arrival, which costs `reduction`."""
        self.memories: dict[str, VirtualMemory] = {}
        """Memory of each shard in which replicas make updates themselves."""
        self.left: Callable[[str, int], None] = lambda *_: None
        """Function called with a role and its incarnation when it has ended by itself, after its last message has
        left."""

    def endpoint(self, role: str, incarnation: int = 0) -> VirtualEndpoint:
        """Make the endpoint of a role, which replaces a closed one of an earlier incarnation."""
        endpoint = self.endpoints[role] = VirtualEndpoint(role, self, incarnation)
        return endpoint

    def says(self, role: str, message: Message) -> bool:
        """Return whether a role can send a message: it lives, or its memory answers in its place."""
        memory = self.memories.get(role)
        return not self.endpoints[role].ended or (memory is not None and type(message) in memory.answers)

    def host_of(self, role: str) -> int:
        """Return the number of the host that a role shares with others; -1 if it has its own machine."""
        if self._hosts is not None:
            return self._hosts.place(role, self._replicas)
        return roles.index_of(role) // self._per_host if self._per_host and roles.is_replica(role) else -1

    def thread_of(self, role: str) -> Thread:
        """Make the thread of a new incarnation of a role."""
        if self._hosts is None:
            return OwnThread(self.clock)
        number = self.host_of(role)
        if number not in self._machines:
            self._machines[number] = VirtualHost(self.clock, self._hosts.cores, self._hosts.together, self._hosts.busy)
        return self._machines[number].thread()

    def delay(self, link: VirtualLink, arrival: Arrival, arrives: float, takes: float, latency: float) -> float:
        """Return the moment of an arrival after additions, random delays and outages.

        `arrives` is the moment without these. `takes` is the time that the message spends in a port, and `latency` that
        of the line, both in seconds.
        """
        model, payload = self.model, arrival.payload
        if model.reduction and payload is not None and self.adds(arrival.event):  # type: ignore[arg-type]  # a message
            arrives = add(link.peer.port, arrives, payload.nbytes * model.reduction)
        if self._unsteady:
            arrives += self._late()
        if self.outages:
            began, alone = link.sender.port.leaves - takes, takes + latency
            while (again := self.heals(link.sender.role, link.peer.role, began, arrives, alone)) > arrives:
                arrives = max(again, link.last + takes)
                began = arrives - alone
        return arrives

    def _late(self) -> float:
        """Draw the extra delay of a message."""
        model, late = self.model, 0.0
        if model.jitter:
            late = model.latency * model.jitter * self.chance.random()
        if model.delay_chance and self.chance.random() < model.delay_chance:
            late += model.delay
        return late

    def heals(self, sender: str, receiver: str, began: float, arrives: float, takes: float) -> float:
        """Return the arrival of a message that is sent again after each outage, which takes `takes` seconds."""
        for start, stop, side in self.outages:
            if began < stop and arrives >= start and (sender in side) is not (receiver in side):
                began, arrives = stop, max(arrives, stop + takes)
        return arrives

    def crash(self, role: str) -> None:
        """End a role as kill -9 does: its peers get `Lost` one latency after its last message."""
        self.endpoints[role].die()


class VirtualLink:
    """One role's end of its link to one incarnation of a peer."""

    __slots__ = ("back", "gone", "last", "peer", "sender")

    def __init__(self, sender: VirtualEndpoint, peer: VirtualEndpoint) -> None:
        self.sender, self.peer, self.gone = sender, peer, False
        self.back: VirtualLink | None = None
        """The peer's end; None while the peer still has the link to an earlier incarnation."""
        self.last = -1.0
        """Arrival of the last message sent; less than 0 before the first."""


class VirtualEndpoint(Endpoint):
    """One role's end of the virtual network."""

    def __init__(self, role: str, network: VirtualNetwork, incarnation: int = 0) -> None:
        super().__init__(role)
        self.network, self.incarnation = network, incarnation
        self.closed = False
        self.port = Port()
        self.host, self.thread = network.host_of(role), network.thread_of(role)
        self.work: MessageCosts | None = None
        """Cost of its messages; None if they take no time."""
        self.ended = False
        """True once nothing more leaves; a closed endpoint first sends messages that wait for work."""
        self._queues = not (roles.is_replica(role) or role == roles.EVALUATOR)
        self._waiting: deque[tuple[VirtualEndpoint, Arrival]] = deque()
        self.arriving = deque[Any]()
        """Clock's queue with this role's arrivals; within a port only jitter and outages change their order."""
        self.links: dict[str, VirtualLink] = {}
        self.unreached: set[str] = set()
        """Roles that could not be reached."""
        self.callers: list[VirtualEndpoint] = []
        """Later incarnations of peers, each with its first message on its way."""

    def allocate(self, held: Range, gradients: int, parameters: int) -> Arena:
        """Make this role's arena; an empty one if payloads are phantoms."""
        return EMPTY if self.network.phantom else super().allocate(held, gradients, parameters)

    def connect(self, role: str, address: str, incarnation: int = -1) -> None:
        peer = self.network.endpoints.get(role)
        if peer is None or peer.closed or 0 <= incarnation != peer.incarnation:
            self.unreached.add(role)
            raise JobFailed(f"{self.role} cannot reach {role}: it does not exist")
        self.unreached.discard(role)
        before = self.links.get(role)
        if before is None or before.peer is not peer:
            if before is not None:
                self._lose((before.peer, f"{role} came again, as incarnation {peer.incarnation}"))
            self._reach(peer)

    def incarnation_of(self, peer: str) -> int:
        link = self.links.get(peer)
        return -1 if link is None or link.gone else link.peer.incarnation

    def has_sent(self, role: str) -> bool:
        """Return whether a message has left on the link to a peer."""
        return role in self.links and self.links[role].last >= 0.0

    def _reach(self, peer: VirtualEndpoint) -> VirtualLink:
        """Open the link to a peer; it replaces an earlier incarnation's link when the first message arrives."""
        link = self.links[peer.role] = VirtualLink(self, peer)
        theirs = peer.links.setdefault(self.role, VirtualLink(peer, self))
        if theirs.peer is self:
            link.back, theirs.back = theirs, link
        else:
            peer.callers.append(self)
        return link

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message: it arrives after the latency and its time in the two ports."""
        if self.closed:
            return
        network = self.network
        if network.memories and self._does_in_memory(to, message, payload):
            return
        link = self.links.get(to)
        if link is None:
            peer = network.endpoints.get(to)
            if peer is None or peer.closed or to in self.unreached:
                network.before_send(self.role, to, message)
                return
            link = self._reach(peer)
        if payload is not None and not network.phantom and not link.gone:
            payload = self.lend(link.peer, message, payload)
        seconds = 0.0 if self.work is None else self.work.saying(message, payload)
        what = link, Arrival(self.role, message, payload)
        if seconds or self.thread.works():
            self.thread.do(seconds, self._leave, what)
        else:
            self._leave(what)

    def _does_in_memory(self, to: str, message: Message, payload: Payload | None) -> bool:
        """Return whether a shard's memory takes the message instead of a link."""
        network = self.network
        if (memory := network.memories.get(to)) and roles.is_replica(self.role) and type(message) in memory.requests:
            network.before_send(self.role, to, message)
            if not self.ended:
                memory.take(self, message, payload)
            return True
        if (held := network.memories.get(self.role)) and type(message) in held.answers:
            held.answer(network.endpoints[to], message, payload)
            return True
        return False

    def lend(self, peer: VirtualEndpoint, message: Message, payload: Payload | None) -> Payload | None:
        """Return a payload for a peer: an answer is copied, a push is not."""
        if payload is None or self.network.phantom or not isinstance(message, Bulk):
            return payload
        arena = peer.arena if message.is_reply else self.arena
        whole = checked(message, payload, len(arena.vectors(message)), arena.held)
        return whole.clone() if message.is_reply else whole

    def _leave(self, what: tuple[VirtualLink, Arrival]) -> None:
        """Send a message once the work for it is done, unless its sender dies then or the link has ended."""
        link, arrival = what
        network, peer = self.network, link.peer
        if network.before_send is not _nothing:
            network.before_send(self.role, peer.role, arrival.event)  # type: ignore[arg-type]  # a message was sent
        if self.ended or link.gone:
            return
        # this runs for millions of messages: local names are faster than attributes
        payload, inside, clock = arrival.payload, network.inside, network.clock
        line = network.model if inside is None or self.host < 0 or self.host != peer.host else inside
        self._count(peer, arrival.event, payload, network.shares and line is inside)  # type: ignore[arg-type]  # as above
        takes = (HEADER if payload is None else HEADER + payload.nbytes) / line.bandwidth
        arrives, last = carry(self.port, peer.port, clock.time, takes, line.latency), link.last
        if not network.plain:
            arrives = network.delay(link, arrival, arrives, takes, line.latency)
        link.last = arrives = arrives if arrives > last else last  # jitter must not change a link's order
        clock.call_at(arrives, peer.take, what, peer.arriving)

    def _count(self, peer: VirtualEndpoint, message: Message, payload: Payload | None, shares: bool) -> None:
        """Count the bytes of a message on both sides; inside a host the payload is read in place."""
        frame, behind = wire.size(message), 0 if payload is None else payload.nbytes
        if not (self.network.phantom or isinstance(message, Bulk)):
            frame -= behind  # the message itself holds the payload
        size, kind, received = frame if shares else frame + behind, message.traffic, peer.traffic
        self.traffic.sent[kind] += size
        received.received[kind] += size
        if shares:
            received.shared_memory[kind] += behind

    def take(self, what: tuple[VirtualLink, Arrival]) -> None:
        """Deliver a message, unless this role is dead or has dropped the sender."""
        theirs, arrival = what
        if self.closed or (theirs.back.gone if theirs.back is not None else not self._succeeds(theirs)):
            return
        self._hand(theirs.sender, arrival if arrival.payload is None else self._landed(arrival))

    def find(self, what: tuple[VirtualEndpoint, Arrival]) -> None:
        """Deliver the answer of a memory, even if the process of its shard has died."""
        if not self.closed:
            sender, arrival = what
            self._hand(sender, self._landed(arrival))

    def _landed(self, arrival: Arrival) -> Arrival:
        """Copy the bytes of an answer to the slot that was requested."""
        event = arrival.event
        if not isinstance(event, SlotReply) or arrival.payload is None:
            return arrival
        here = None if self.network.phantom else self.arena.part(event).copy_(arrival.payload)  # type: ignore[arg-type]  # bytes, unless phantoms
        return Arrival(arrival.sender, event, here)

    def _succeeds(self, theirs: VirtualLink) -> bool:
        """Return whether a message is from a later incarnation than the link's, and replace the link if it is.

        A message from an earlier incarnation is late, and is ignored.
        """
        sender = theirs.sender
        before = self.links[sender.role].peer
        if sender.incarnation < before.incarnation:
            return False
        self._lose((before, f"{sender.role} came again, as incarnation {sender.incarnation}"))
        link = self.links[sender.role] = VirtualLink(self, sender)
        link.back, theirs.back = theirs, link
        return True

    def _hand(self, sender: VirtualEndpoint, arrival: Arrival) -> None:
        """Deliver an arrival: at once, or to a state machine once its work for earlier ones is done."""
        if self.work is not None:
            if self._queues and (self._waiting or self.thread.works()):
                self._waiting.append((sender, arrival))
                if len(self._waiting) == 1:
                    self.thread.do(0.0, self._hand_next, None)
                return
            self.thread.owe(self.work.taking(arrival.event, arrival.payload))
        self._tell(arrival)

    def _hand_next(self, _: None) -> None:
        """Deliver the next waiting arrival, unless a later incarnation of its sender has come."""
        if not self.closed:
            assert self.work is not None
            sender, arrival = self._waiting[0]
            if self.links[sender.role].peer is sender or isinstance(arrival.event, Lost):
                self.thread.owe(self.work.taking(arrival.event, arrival.payload))
                self._tell(arrival)
            self._waiting.popleft()
            if self._waiting:
                self.thread.do(0.0, self._hand_next, None)

    def _tell(self, arrival: Arrival) -> None:
        watch = self.network.watch
        if watch is not _nothing and isinstance(arrival.event, Message):
            watch(arrival.sender, self.role, arrival.event)
        self.deliver(arrival)

    def drop(self, peer: str, reason: str) -> None:
        link = self.links.get(peer)
        if link is not None and not link.gone:
            link.peer._hear_of_end(self, f"{self.role} closed the link: {reason}", link.last)
            self._end_link(link.peer, reason, self.network.clock.time + self.network.model.latency)

    def close(self) -> None:
        """End this role: every peer gets `Lost` after its last message."""
        if self.closed:
            return
        self.closed = True
        if self.thread.works():
            self.thread.do(0.0, self._leave_for_good, None)
        else:
            self._leave_for_good(None)

    def _leave_for_good(self, _: None) -> None:
        if not self.ended:
            self._end()
            self.network.left(self.role, self.incarnation)

    def die(self) -> None:
        """End this role as kill -9 does: messages that wait for work are never sent."""
        self.thread.stop()
        self.closed = True
        self._end()
        for memory in self.network.memories.values():
            memory.leave(self)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        # these callers have linked to this role, which still has a link to their earlier incarnation
        peers = (*(link.peer for link in self.links.values()), *self.callers)
        for peer in {id(peer): peer for peer in peers}.values():
            peer._hear_of_end(self, f"{self.role} ended", self.links[peer.role].last)

    def _hear_of_end(self, peer: VirtualEndpoint, reason: str, after: float) -> None:
        """Drop a peer that has ended its link: a latency later, after its last message, and not across an outage."""
        network = self.network
        now, latency = network.clock.time, network.model.latency
        moment = max(now + latency, after)
        self._end_link(peer, reason, network.heals(peer.role, self.role, now, moment, latency))

    def _end_link(self, peer: VirtualEndpoint, reason: str, moment: float) -> None:
        self.network.clock.call_at(moment, self._lose, (peer, reason))

    def _lose(self, what: tuple[VirtualEndpoint, str]) -> None:
        peer, reason = what
        link = self.links[peer.role]
        if not self.closed and not link.gone and link.peer is peer:
            link.gone = True
            self._hand(peer, Arrival(peer.role, Lost(reason, peer.incarnation)))


class VirtualMemory:
    """Memory of a shard in which replicas make updates themselves, one after another. It outlives the shard's process.

    Args:
        requests: kinds of messages that are handled here instead of being sent.
        answers: kinds of messages that answer them.
        may: returns whether a role's message can be acted on now.
        do: acts on a message; returns the shard's effects.
    """

    def __init__(
        self,
        network: VirtualNetwork,
        role: str,
        requests: Collection[type],
        answers: Collection[type],
        may: Callable[[str, Message], bool],
        do: Callable[[str, Message, Payload | None], Iterable[Effect]],
    ) -> None:
        self.role, self.requests, self.answers = role, requests, answers
        self._network, self._may, self._do = network, may, do
        self.turns: deque[Turn] = deque()
        """Message of the role that has the lock, then those of the roles that wait for it."""
        self._early: list[Turn] = []
        """Messages whose turn came before they could be acted on."""
        self._behind: dict[VirtualEndpoint, list[Turn]] = {}
        """Messages of each role whose push waits; the push is first."""

    def take(self, sender: VirtualEndpoint, message: Message, payload: Payload | None) -> None:
        """Have a role act on its message once it has the lock."""
        turn = sender, message, sender.lend(sender, message, payload)
        if sender in self._behind or (payload is not None and not self._may(sender.role, message)):
            self._behind.setdefault(sender, []).append(turn)
            return
        self.turns.append(turn)
        if len(self.turns) == 1:
            self._begin()

    def _begin(self) -> None:
        """Begin the turn of the first role, which has the lock and works."""
        sender, message, payload = self.turns[0]
        seconds = 0.0 if sender.work is None else sender.work.passing(message, payload)
        sender.thread.do(seconds, self._end, None)

    def _end(self, _: None) -> None:
        """End a turn: act on its message, and pass the lock on."""
        turn = self.turns.popleft()
        left = [] if self._done(turn) else [turn]
        goes_on = bool(self.turns)
        self.look()
        self._early += left
        if goes_on and self.turns:
            self._begin()

    def look(self) -> None:
        """Act on messages that waited for the shard to change, which it just did."""
        early, self._early = self._early, []
        self._early = [turn for turn in early if not self._done(turn)]
        idle = not self.turns
        for sender in [role for role, turns in self._behind.items() if self._may(role.role, turns[0][1])]:
            self.turns += self._behind.pop(sender)
        if idle and self.turns:
            self._begin()

    def _done(self, turn: Turn) -> bool:
        sender, message, payload = turn
        if not self._may(sender.role, message):
            return False
        self._network.watch(sender.role, self.role, message)
        if payload is not None:
            sender.traffic.shared_memory[message.traffic] += payload.nbytes
        for effect in self._do(sender.role, message, payload):
            assert isinstance(effect, Send), f"{self.role} asks {sender.role} for {effect}"
            assert effect.to == sender.role, f"{self.role} asks {sender.role} for {effect}"
            self.answer(sender, effect.message, effect.payload)
        return True

    def answer(self, to: VirtualEndpoint, message: Message, payload: Payload | None) -> None:
        """Answer at once; the receiver then works to bring the bytes to its vector."""
        shard = self._network.endpoints[self.role]
        payload = shard.lend(to, message, payload)
        self._network.before_send(self.role, to.role, message)
        answer = (shard, Arrival(self.role, message, payload))
        if seconds := 0.0 if to.work is None else to.work.landing(payload):
            to.traffic.shared_memory[message.traffic] += payload.nbytes  # type: ignore[union-attr]  # only bytes cost seconds
            to.thread.do(seconds, to.find, answer)
        else:
            self._network.clock.call_at(self._network.clock.time, to.find, answer)

    def leave(self, dead: VirtualEndpoint) -> None:
        """Drop the messages of a dead role, and release its lock."""
        held = bool(self.turns) and self.turns[0][0] is dead
        self.turns = deque(turn for turn in self.turns if turn[0] is not dead)
        self._early = [turn for turn in self._early if turn[0] is not dead]
        self._behind.pop(dead, None)
        if held and self.turns:
            self._begin()


Turn = tuple[VirtualEndpoint, Message, Payload | None]
"""Turn of a role in a shard's memory, with its message."""


def _nothing(sender: str, to: str, message: Message) -> None:
    """Do nothing: no fault, no checker."""
