"""The virtual network: all roles in one process, on simulated time, with delays, outages and crashes by a seed.

A link behaves as TCP does: what one role sends another arrives in order, late or not at all because one of the two is
dead. Messages that leave one role share its bandwidth, and so do those that reach it; each carries its payload and
`HEADER` bytes. What an outage meets on its way is sent again when it heals, at the bandwidth of its own link; nothing
is lost by it, and nobody hears of a death on its other side before. A link opens at once, also across an outage; only
what is sent on it waits.

A role is one thread. A machine is handed an arrival when it is done with those before, and with the work that this one
makes; what it sends leaves when the work for that is done. A story finds what has arrived as soon as it looks; the work
for it delays what the story does next.
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
"""Bytes of a message beside its payload, as the simulation counts them."""


MEMORY = LinkModel(8e-6, math.inf)
"""Shared memory as a link: the time in which somebody wakes who waits for it, as the benchmark `wire` measured it."""


class VirtualNetwork:
    """All links of a simulated cluster, and the processors of its roles.

    Args:
        clock: moves the time.
        model: what the network is like.
        settings: of the job: the seed is that of jitter and delays, and links inside of a host may be others.
        phantom: whether payloads are only lengths, so that arenas are empty.
        hosts: the machines that roles share; each role has its own where there are none.
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
        """True where nothing delays a message but its line and the two ports."""
        self.chance = random.Random(settings.seed)
        self.phantom = phantom
        usual = LinkModel(self.model.latency, self.model.bandwidth)
        base = MEMORY if hosts else usual
        inside = LinkModel(self.model.local_latency or base.latency, self.model.local_bandwidth or base.bandwidth)
        self._per_host, self._hosts, self._replicas = settings.strategy.host_replicas, hosts, settings.replicas
        self.inside = inside if (self._per_host or hosts) and inside != usual else None
        """Model of links inside a host, where it differs."""
        self.shares = self.inside is not None and self.inside.bandwidth == math.inf
        """True where these are shared memory, in which nothing is sent."""
        self._machines: dict[int, VirtualHost] = {}
        self.endpoints: dict[str, VirtualEndpoint] = {}
        self.before_send: Callable[[str, str, Message], None] = _nothing
        """Called with sender, receiver and message before each message leaves: where faults are injected."""
        self.watch: Callable[[str, str, Message], None] = _nothing
        """Called as each message is delivered: where checkers stand."""
        self.adds: Callable[[Message], bool] = lambda _: False
        """Tells whether the bytes of a message are added to others on arrival, which costs `reduction`."""
        self.memories: dict[str, VirtualMemory] = {}
        """Memories in which replicas make updates themselves, by shard."""
        self.left: Callable[[str, int], None] = _nobody
        """Called with a role and its incarnation, once it has ended by itself and all that it said has left."""

    def endpoint(self, role: str, incarnation: int = 0) -> VirtualEndpoint:
        """The endpoint of a role; one of an earlier incarnation, which must be closed, is replaced."""
        endpoint = self.endpoints[role] = VirtualEndpoint(role, self, incarnation)
        return endpoint

    def says(self, role: str, message: Message) -> bool:
        """Return whether a message leaves a role: it lives, or its memory answers for it."""
        memory = self.memories.get(role)
        return not self.endpoints[role].ended or (memory is not None and type(message) in memory.answers)

    def host_of(self, role: str) -> int:
        """The number of the host that a role shares with others; -1 for a machine of its own."""
        if self._hosts is not None:
            return self._hosts.place(role, self._replicas)
        return roles.index_of(role) // self._per_host if self._per_host and roles.is_replica(role) else -1

    def thread_of(self, role: str) -> Thread:
        """A thread for one more life of a role."""
        if self._hosts is None:
            return OwnThread(self.clock)
        number = self.host_of(role)
        if number not in self._machines:
            self._machines[number] = VirtualHost(self.clock, self._hosts.cores, self._hosts.together, self._hosts.busy)
        return self._machines[number].thread()

    def delay(self, link: VirtualLink, arrival: Arrival, arrives: float, takes: float, latency: float) -> float:
        """When something arrives that is added to others there, comes by chance later, or meets outages.

        Args:
            link: from the port that it has left to the one that it has entered; `last` is when what was sent before it
                arrives.
            arrival: what it is.
            arrives: when it would.
            takes: seconds that it takes through a port.
            latency: of the line.
        """
        model, payload = self.model, arrival.payload
        if model.reduction and payload is not None and self.adds(arrival.event):  # type: ignore[arg-type]  # a message
            arrives = add(link.peer.port, arrives, payload.nbytes * model.reduction)
        if self._unsteady:
            arrives += self._late()
        if self.outages:
            began, alone = link.own.port.leaves - takes, takes + latency
            while (again := self.heals(link.own.role, link.peer.role, began, arrives, alone)) > arrives:
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
        """Return when it arrives, if it is sent again after each outage that meets it, taking so long."""
        for start, stop, side in self.outages:
            if began < stop and arrives >= start and (sender in side) is not (receiver in side):
                began, arrives = stop, max(arrives, stop + takes)
        return arrives

    def crash(self, role: str) -> None:
        """End a role as kill -9 does: its peers see `Lost` one latency after what it had sent."""
        self.endpoints[role].die()


class VirtualLink:
    """One role's end of its link to a life of a peer.

    Args:
        own: the role's endpoint.
        peer: the other end.
    """

    __slots__ = ("back", "gone", "last", "own", "peer")

    def __init__(self, own: VirtualEndpoint, peer: VirtualEndpoint) -> None:
        self.own, self.peer, self.gone = own, peer, False
        self.back: VirtualLink | None = None
        """The peer's end; None until a first word replaces what that has to a life before."""
        self.last = -1.0
        """When what was sent last arrives; less than 0 where nothing was."""


class VirtualEndpoint(Endpoint):
    """One role's end of the virtual network."""

    def __init__(self, role: str, network: VirtualNetwork, incarnation: int = 0) -> None:
        super().__init__(role)
        self.network, self.incarnation = network, incarnation
        self.closed = False
        self.port = Port()
        self.host, self.thread = network.host_of(role), network.thread_of(role)
        self.work: MessageCosts | None = None
        """Cost of its messages; None is no time."""
        self.ended = False
        """True once closed: earlier messages still leave, no others do."""
        self._queues = not (roles.is_replica(role) or role == roles.EVALUATOR)
        self._waiting: deque[tuple[VirtualEndpoint, Arrival]] = deque()
        self.arriving = deque[Any]()
        """The clock's queue of what comes here: through one port nothing overtakes, but by jitter and outages."""
        self.links: dict[str, VirtualLink] = {}
        self.unreached: set[str] = set()
        """Roles to which there is no link, because opening one has failed."""
        self.callers: list[VirtualEndpoint] = []
        """Later lives of peers, whose first word is on its way."""

    def allocate(self, held: Range, gradients: int, parameters: int) -> Arena:
        """Make this role's arena; an empty one where payloads are phantoms."""
        return EMPTY if self.network.phantom else super().allocate(held, gradients, parameters)

    def connect(self, role: str, address: str, incarnation: int = -1) -> None:
        peer = self.network.endpoints.get(role)
        if peer is None or peer.closed or 0 <= incarnation != peer.incarnation:
            self.unreached.add(role)
            raise JobFailed(f"{self.role} cannot reach {role}: it is not there")
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
        """Return whether anything has left on the link to a peer."""
        return role in self.links and self.links[role].last >= 0.0

    def _reach(self, peer: VirtualEndpoint) -> VirtualLink:
        """Have a link to a peer, who sees ours replace that of our life before with our first word."""
        link = self.links[peer.role] = VirtualLink(self, peer)
        theirs = peer.links.setdefault(self.role, VirtualLink(peer, self))
        if theirs.peer is self:
            link.back, theirs.back = theirs, link
        else:
            peer.callers.append(self)
        return link

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message; it arrives after the link's latency and its bytes' time to leave here and enter there."""
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
        """Return whether a shard's memory takes the message, so that it is not sent."""
        network = self.network
        if (memory := network.memories.get(to)) and roles.is_replica(self.role) and type(message) in memory.taken:
            network.before_send(self.role, to, message)
            if not self.ended:
                memory.take(self, message, payload)
            return True
        if (held := network.memories.get(self.role)) and type(message) in held.answers:
            held.answer(network.endpoints[to], message, payload)
            return True
        return False

    def lend(self, peer: VirtualEndpoint, message: Message, payload: Payload | None) -> Payload | None:
        """A payload as a peer is to find it; what it has asked for, as that is now."""
        if payload is None or self.network.phantom or not isinstance(message, Bulk):
            return payload
        arena = peer.arena if message.asked else self.arena
        whole = checked(message, payload, len(arena.vectors(message)), arena.held)
        return whole.clone() if message.asked else whole

    def _leave(self, what: tuple[VirtualLink, Arrival]) -> None:
        """The work for a message is done: it leaves now, unless its sender dies of it, or the link has ended."""
        link, arrival = what
        network, peer = self.network, link.peer
        if network.before_send is not _nothing:
            network.before_send(self.role, peer.role, arrival.event)  # type: ignore[arg-type]  # a message was sent
        if self.ended or link.gone:
            return
        payload, inside, clock = arrival.payload, network.inside, network.clock
        line = network.model if inside is None or self.host < 0 or self.host != peer.host else inside
        self._count(peer, arrival.event, payload, network.shares and line is inside)  # type: ignore[arg-type]  # as above
        takes = (HEADER if payload is None else HEADER + payload.nbytes) / line.bandwidth
        arrives, last = carry(self.port, peer.port, clock.time, takes, line.latency), link.last
        if not network.plain:
            arrives = network.delay(link, arrival, arrives, takes, line.latency)
        link.last = arrives = arrives if arrives > last else last
        clock.call_at(arrives, peer.take, what, peer.arriving)

    def _count(self, peer: VirtualEndpoint, message: Message, payload: Payload | None, shares: bool) -> None:
        """Count what leaves here and enters there; inside a host a payload is read where it lies."""
        frame, behind = wire.size(message), 0 if payload is None else payload.nbytes
        if not (self.network.phantom or isinstance(message, Bulk)):
            frame -= behind  # it is in the message, too
        size, kind, received = frame if shares else frame + behind, message.traffic, peer.traffic
        self.traffic.sent[kind] += size
        received.received[kind] += size
        if shares:
            received.shared_memory[kind] += behind

    def take(self, what: tuple[VirtualLink, Arrival]) -> None:
        """Deliver what arrives now, unless this role is dead or has dropped the sender."""
        theirs, arrival = what
        if self.closed or (theirs.back.gone if theirs.back is not None else not self._succeeds(theirs)):
            return
        self._hand(theirs.own, arrival if arrival.payload is None else self._landed(arrival))

    def find(self, what: tuple[VirtualEndpoint, Arrival]) -> None:
        """Have what this role has done in a memory, whatever has become of the process that it belongs to."""
        if not self.closed:
            sender, arrival = what
            self._hand(sender, self._landed(arrival))

    def _landed(self, arrival: Arrival) -> Arrival:
        """Return the arrival with its bytes in the buffer that was asked for."""
        event = arrival.event
        if not isinstance(event, SlotReply) or arrival.payload is None:
            return arrival
        here = None if self.network.phantom else self.arena.part(event).copy_(arrival.payload)  # type: ignore[arg-type]  # bytes, unless phantoms
        return Arrival(arrival.sender, event, here)

    def _succeeds(self, theirs: VirtualLink) -> bool:
        """Return whether a message is from a later incarnation than the link's, which is then gone.

        Otherwise it was on its way since a former life.
        """
        sender = theirs.own
        before = self.links[sender.role].peer
        if sender.incarnation < before.incarnation:
            return False
        self._lose((before, f"{sender.role} came again, as incarnation {sender.incarnation}"))
        link = self.links[sender.role] = VirtualLink(self, sender)
        link.back, theirs.back = theirs, link
        return True

    def _hand(self, sender: VirtualEndpoint, arrival: Arrival) -> None:
        """Hand an arrival to this role: at once, or when a machine has done its work with those before."""
        if self.work is not None:
            if self._queues and (self._waiting or self.thread.works()):
                self._waiting.append((sender, arrival))
                if len(self._waiting) == 1:
                    self.thread.do(0.0, self._hand_next, None)
                return
            self.thread.owe(self.work.taking(arrival.event, arrival.payload))
        self._tell(arrival)

    def _hand_next(self, _: None) -> None:
        """Hand on what waits, once work is done; a former life's word counts no more where the next has come."""
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
        """End this role: every peer is told `Lost` after all that was sent before."""
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
        """End this role as kill -9 does: what it had no time to say is not said."""
        self.thread.stop()
        self.closed = True
        self._end()
        for memory in self.network.memories.values():
            memory.leave(self)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        peers = (*(link.peer for link in self.links.values()), *self.callers)
        for peer in {id(peer): peer for peer in peers}.values():
            peer._hear_of_end(self, f"{self.role} ended", self.links[peer.role].last)

    def _hear_of_end(self, peer: VirtualEndpoint, reason: str, after: float) -> None:
        """Hear that a peer has ended its link: a latency later, after all it has sent, and not across an outage."""
        network = self.network
        now, latency = network.clock.time, network.model.latency
        moment = max(now + latency, after)
        self._end_link(
            peer, reason, network.heals(peer.role, self.role, now, moment, latency) if network.outages else moment
        )

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
        network: on which they are.
        role: the shard.
        taken: the messages that are not sent, but done here.
        answers: what comes of them.
        may: whether a role may do that now, or waits for others to have done something.
        do: does it; returns what the shard would answer.

    Attributes:
        turns: who has the lock, and who waits for it, each for what it is to do.
    """

    def __init__(
        self,
        network: VirtualNetwork,
        role: str,
        taken: Collection[type],
        answers: Collection[type],
        may: Callable[[str, Message], bool],
        do: Callable[[str, Message, Payload | None], Iterable[Effect]],
    ) -> None:
        self.role, self.taken, self.answers = role, taken, answers
        self._network, self._may, self._do = network, may, do
        self.turns: deque[Turn] = deque()
        self._early: list[Turn] = []
        """Messages that could not be acted on in their turn yet."""
        self._behind: dict[VirtualEndpoint, list[Turn]] = {}
        """Acts of each role from its push on, which wait for its turn."""

    def take(self, sender: VirtualEndpoint, message: Message, payload: Payload | None) -> None:
        """Have a role do something, as soon as it has the lock."""
        turn = sender, message, sender.lend(sender, message, payload)
        if sender in self._behind or (payload is not None and not self._may(sender.role, message)):
            self._behind.setdefault(sender, []).append(turn)
            return
        self.turns.append(turn)
        if len(self.turns) == 1:
            self._begin()

    def _begin(self) -> None:
        """Whoever is the first has the lock, and works."""
        sender, message, payload = self.turns[0]
        seconds = 0.0 if sender.work is None else sender.work.passing(message, payload)
        sender.thread.do(seconds, self._end, None)

    def _end(self, _: None) -> None:
        """Publish what was done, and pass the lock on."""
        turn = self.turns.popleft()
        left = [] if self._done(turn) else [turn]
        goes_on = bool(self.turns)
        self.look()
        self._early += left
        if goes_on and self.turns:
            self._begin()

    def look(self) -> None:
        """Something has changed: do what could not be done before it."""
        early, self._early = self._early, []
        self._early = [turn for turn in early if not self._done(turn)]
        idle = not self.turns
        for sender in [one for one, turns in self._behind.items() if self._may(one.role, turns[0][1])]:
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
        """Answer at once; whoever has asked works to have it where it wants it."""
        shard = self._network.endpoints[self.role]
        payload = shard.lend(to, message, payload)
        self._network.before_send(self.role, to.role, message)
        answer = (shard, Arrival(self.role, message, payload))
        if seconds := 0.0 if to.work is None else to.work.landing(payload):
            to.traffic.shared_memory[message.traffic] += payload.nbytes  # type: ignore[union-attr]  # what lands is bytes
            to.thread.do(seconds, to.find, answer)
        else:
            self._network.clock.call_at(self._network.clock.time, to.find, answer)

    def leave(self, dead: VirtualEndpoint) -> None:
        """Whoever dies gives back the lock, and has done nothing."""
        held = bool(self.turns) and self.turns[0][0] is dead
        self.turns = deque(turn for turn in self.turns if turn[0] is not dead)
        self._early = [turn for turn in self._early if turn[0] is not dead]
        self._behind.pop(dead, None)
        if held and self.turns:
            self._begin()


Turn = tuple[VirtualEndpoint, Message, Payload | None]
"""A message that a role is to act on in a shard's memory."""


def _nothing(sender: str, to: str, message: Message) -> None:
    """No fault, no checker."""


def _nobody(role: str, incarnation: int) -> None:
    """Nobody is told of an end."""
