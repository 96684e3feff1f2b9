"""Carrier inside one process, which delivers one message at a time: the reference for the others."""

from __future__ import annotations

from collections import deque

import torch

from distbelief.core import wire
from distbelief.core.effects import Arrival, Payload
from distbelief.core.events import Lost
from distbelief.core.messages import Bulk, Message, SlotReply
from distbelief.errors import JobFailed, LocalProtocolError
from distbelief.transport.base import Endpoint, checked


class Inline:
    """Network of roles in one process; the first message between two roles makes their link.

    >>> from distbelief.core.conversations.checkpointing import Describe
    >>> network = Inline()
    >>> a, b = network.endpoint("a"), network.endpoint("b")
    >>> b.deliver = print
    >>> a.send("b", Describe())
    >>> network.step()
    Arrival(sender='a', event=Describe(), payload=None)
    True
    >>> network.step()
    False
    """

    def __init__(self) -> None:
        self.endpoints: dict[str, InlineEndpoint] = {}
        self.queue: deque[tuple[str, Arrival]] = deque()

    def endpoint(self, role: str) -> InlineEndpoint:
        """Make the endpoint of a role; an earlier one of that name must be closed."""
        if role in self.endpoints:
            raise LocalProtocolError(f"{role} has an endpoint already: close it before making another")
        end = self.endpoints[role] = InlineEndpoint(role, self)
        # a new endpoint of that name is another incarnation: links cut from the last one may open again
        for other in self.endpoints.values():
            other.cut.discard(role)
        return end

    def step(self) -> bool:
        """Deliver the oldest message; return whether there was one."""
        while self.queue:
            to, arrival = self.queue.popleft()
            end = self.endpoints.get(to)
            if end is not None:
                end.receive(arrival)
                return True
        return False


class InlineEndpoint(Endpoint):
    """One role's end of an `Inline` network."""

    def __init__(self, role: str, network: Inline) -> None:
        super().__init__(role)
        self.network = network
        self.links: set[str] = set()
        self.cut: set[str] = set()

    def connect(self, role: str, address: str, incarnation: int = -1) -> None:
        if role not in self.network.endpoints:
            raise JobFailed(f"{self.role} cannot reach {role}: it does not exist")

    def incarnation_of(self, peer: str) -> int:
        """Return 0: no role has a second incarnation here."""
        return 0 if peer in self.links else -1

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message; the payload of an answer is copied, that of a push is not."""
        peer = self.network.endpoints.get(to)
        if peer is None or to in self.cut:
            return
        if isinstance(message, Bulk) and isinstance(payload, torch.Tensor):
            lender = peer.arena if message.is_reply else self.arena
            whole = checked(message, payload, len(lender.vectors(message)), lender.held)
            # a shard may write to its parameters at once; a replica does not write to a pushed slot
            payload = whole.clone() if message.is_reply else whole
        self.links.add(to)
        peer.links.add(self.role)
        size = wire.size(message) + (payload.nbytes if isinstance(message, Bulk) and payload is not None else 0)
        self.traffic.sent[message.traffic] += size
        peer.traffic.received[message.traffic] += size
        self.network.queue.append((to, Arrival(self.role, message, payload)))

    def receive(self, arrival: Arrival) -> None:
        """Put an answer's payload where it belongs, and deliver."""
        message, payload = arrival.event, arrival.payload
        if isinstance(message, SlotReply) and isinstance(payload, torch.Tensor):
            here = self.arena.part(message)
            here.copy_(payload)
            arrival = Arrival(arrival.sender, message, here)
        self.deliver(arrival)

    def drop(self, peer: str, reason: str) -> None:
        """Close the link to a peer that broke the protocol, and drop its messages on the way; both hear `Lost`."""
        if peer in self.links:
            queue = self.network.queue
            coming = [entry for entry in queue if entry[0] == self.role and entry[1].sender == peer]
            for entry in coming:
                queue.remove(entry)
            self._part(peer, f"{self.role} closed its link: {reason}")
            self.cut.add(peer)
            queue.append((self.role, Arrival(peer, Lost(reason))))

    def close(self) -> None:
        if self.network.endpoints.get(self.role) is self:
            del self.network.endpoints[self.role]
            for peer in list(self.links):
                self._part(peer, f"{self.role} closed its link")

    def _part(self, peer: str, reason: str) -> None:
        self.links.discard(peer)
        other = self.network.endpoints.get(peer)
        if other is not None and self.role in other.links:
            other.links.discard(self.role)
            other.cut.add(self.role)
            self.network.queue.append((peer, Arrival(self.role, Lost(reason))))
