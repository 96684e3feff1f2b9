"""Common part of the carriers over sockets: admission, introductions, frames, and the poll loop."""

from __future__ import annotations

import logging
import os
import select
import socket
from abc import abstractmethod
from collections.abc import Callable
from time import monotonic

import torch

from distbelief.core import wire
from distbelief.core.effects import Arrival, Payload
from distbelief.core.events import Lost
from distbelief.core.messages import CONTROL, Bulk, Hello, Message, SlotRequest
from distbelief.errors import JobFailed, LocalProtocolError, RemoteProtocolError
from distbelief.transport.base import NetworkEndpoint, checked, outside
from distbelief.transport.link import (
    HELLO_LIMIT,
    HELLO_SECONDS,
    IN,
    OUT,
    STRANGERS_LIMIT,
    Link,
    acceptable,
    closed_on_error,
    drain,
)

LOOK_SECONDS = 300e-6
"""Time to look before sleeping: waking a process on another core takes 20 to 50 us, longer than a short message."""
CROWDED_SECONDS = 20e-6
"""Duration of a yield which shows that another thread works on this core; looking would disturb it."""
REST_LIMIT = 63
"""Most consecutive waits that sleep without looking."""
_EVENTS = 128  # most links returned by one wait; the kernel takes turns among the ready ones
CLOSE_SECONDS = 1.0
"""Limit for `close` to send the last messages."""
_READ = 16 << 10  # bytes read with a frame: any payload among them must be copied once more
_FLUSH = 128 << 10  # more queued bytes than this are sent before the next poll
_log = logging.getLogger(__name__)


class Patience:
    """Waits for an epoll's events, which look for a moment before they sleep, as long as that pays."""

    # After a look without an event the next wait sleeps at once; after another such look the next two waits do, then
    # four, and so on. So a busy machine loses hardly any time by looking.

    def __init__(self, epoll: select.epoll) -> None:
        self._poll = epoll.poll
        self._rest = self._resting = 0

    def wait(self, timeout: float | None) -> list[tuple[int, int]]:
        """Return the next events; none after `timeout` seconds. None sets no limit."""
        poll = self._poll
        if self._resting or (timeout is not None and timeout <= LOOK_SECONDS):
            self._resting = max(0, self._resting - 1)
            return poll(timeout, _EVENTS)
        now = monotonic()
        end = now + LOOK_SECONDS
        while now < end:
            if events := poll(0, _EVENTS):
                self._rest = 0
                return events
            before = now
            os.sched_yield()
            now = monotonic()
            if now - before > CROWDED_SECONDS:
                break
        self._rest = self._resting = min(2 * self._rest + 1, REST_LIMIT)
        return poll(timeout, _EVENTS)


class SocketEndpoint(NetworkEndpoint):
    """One role's end over stream sockets, for one thread at a time."""

    def __init__(self, role: str, job: str, incarnation: int = 0) -> None:
        super().__init__(role)
        self.job, self.incarnation = job, incarnation
        self._epoll = select.epoll()
        self._patience = Patience(self._epoll)
        self._listener: socket.socket | None = None
        self._links: dict[str, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._strangers: dict[int, Link] = {}
        self._dirty: list[Link] = []
        self._unsettled: list[Link] = []
        self._failed: list[Link] = []
        self._watched: dict[int, Callable[[], None]] = {}
        self._spare: list[bytearray] = []
        self._scratch = memoryview(bytearray(_READ))
        self._delivered = self._closed = self._feels = False
        self.deliver_end = lambda arrival: self.deliver(arrival)

    @abstractmethod
    def _dial(self, role: str, address: str) -> socket.socket:
        """Connect to a role, and wait for the connection; raise OSError, or UsageError for another kind of address."""

    @abstractmethod
    def _admit(self, connection: socket.socket) -> socket.socket:
        """Prepare an accepted connection; raise OSError to refuse it."""

    @abstractmethod
    def _borrow(self, link: Link) -> None:
        """Set `link.lent` to the vectors that the peer's Hello lends.

        Raise RemoteProtocolError if that is impossible.
        """

    @abstractmethod
    def _carry(self, link: Link, message: Bulk, payload: torch.Tensor) -> memoryview | None:
        """Bring a payload to the peer, or return the bytes to send after its message."""

    @abstractmethod
    def _landing(self, payload: torch.Tensor) -> memoryview | None:
        """Return the buffer for the bytes that follow a message; None if none do."""

    def _introduce(self, connection: socket.socket, frame: bytes) -> None:
        """Send the first frame of a link."""
        connection.sendall(frame)

    def _receive_first(self, link: Link) -> int:
        """Receive from a link without an introduction, into the scratch buffer."""
        return link.socket.recv_into(self._scratch, HELLO_LIMIT)

    def _linger(self, link: Link, deadline: float) -> None:
        """Wait until closing the link can no longer lose sent messages."""

    def connect(self, role: str, address: str, incarnation: int = -1) -> None:
        if (old := self._links.get(role)) is not None:
            if incarnation <= old.hello.incarnation:
                raise LocalProtocolError(
                    f"{self.role} has a link to {role} already; wait for its Lost before opening another"
                )
            self._lose(old, f"{role} is at another address now, as incarnation {incarnation}")
        try:
            connection = self._dial(role, address)
            with closed_on_error(connection):
                hello = wire.encode(self._hello(incarnation))
                self._introduce(connection, hello)
                self.traffic.sent[CONTROL] += len(hello)
                connection.setblocking(False)
        except OSError as error:
            raise JobFailed(
                f"{self.role} cannot reach {role} at {address}: {error}; is it still running, and is the address right?"
            ) from error
        link = self._links[role] = self._add(connection, Hello(self.job, role, incarnation))
        self._bound(link)

    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        link = self._links.get(to)
        if link is None or link.error:
            return
        frame = wire.encode(message)
        size, queue = len(frame), link.queue
        if isinstance(message, Bulk):
            if message.is_reply:
                slots, held = link.hello.parameters, link.held
            else:
                slots, held = len(self.arena.gradients), self.arena.held
            data = self._carry(link, message, checked(message, payload, slots, held))
            queue.append(frame)
            if data is not None and data.nbytes:
                size += data.nbytes
                if message.is_reply:
                    data = data.toreadonly()  # read-only, so that `settle` can tell an answer's memory from a push's
                    if not link.unsettled:
                        link.unsettled = True
                        self._unsettled.append(link)
                queue.append(data)
        else:
            queue.append(frame)
        link.queued += size
        self.traffic.sent[message.traffic] += size
        if not link.dirty:
            link.dirty = True
            self._dirty.append(link)
        # a long queue is sent at once: the next poll may come only after a long step
        if link.queued > _FLUSH:
            if not link.writing:
                link.flush()
            if link.queued > link.limit:
                self._drop_later(
                    link, f"{to} does not read: {link.queued} bytes are kept for it, over the limit of {link.limit}"
                )

    def incarnation_of(self, peer: str) -> int:
        return self._links[peer].hello.incarnation if peer in self._links else -1

    def flush(self) -> None:
        for link in self._dirty:
            link.dirty = False
            if not link.writing and not link.closed:
                link.flush()
        self._dirty.clear()

    def settle(self) -> None:
        if self._unsettled:
            for link in self._unsettled:
                link.settle()
            self._unsettled.clear()

    def drop(self, peer: str, reason: str) -> None:
        if (link := self._links.get(peer)) is not None and not link.dropped:
            self._drop_later(link, reason)

    def watch(self, fileno: int, ready: Callable[[], None]) -> None:
        self._watched[fileno] = ready
        self._epoll.register(fileno, IN)

    def poll(self, timeout: float | None) -> None:
        if self._closed:
            return
        self._delivered = False
        end = None if timeout is None else monotonic() + timeout
        by_fd = self._by_fd
        while True:
            self.flush()
            # most polls have no failed or new link, and need not look at deadlines
            wait = self._attend(timeout) if self._failed or self._strangers or self._feels else timeout
            if self._closed:
                return
            for fd, events in self._patience.wait(wait):
                known = by_fd.get(fd)
                if known is None:
                    self._other(fd)
                else:
                    if events & OUT:
                        known.flush()
                    if events & ~OUT:
                        self._read(known)
                if self._closed:
                    return
            if self._delivered:
                return
            if end is not None:
                timeout = end - monotonic()
                if timeout <= 0:
                    return

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = monotonic() + CLOSE_SECONDS
        # the listener closes first: a role that is about to end accepts no more links
        if self._listener is not None:
            self._listener.close()
        for link in list(self._strangers.values()):
            self._shut(link)
        drain(self._links.values(), deadline)
        for link in list(self._links.values()):
            self._linger(link, deadline)
            self._shut(link)
        self._links.clear()
        self._epoll.close()
        self._spare.clear()

    def _hello(self, peer: int = -1) -> Hello:
        gradients, parameters, held = self.arena
        sizes = held.size, len(gradients), len(parameters)
        return Hello(self.job, self.role, self.incarnation, *sizes, peer, held.start)

    def _listen_on(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._epoll.register(listener.fileno(), IN)

    def _add(self, connection: socket.socket, hello: Hello) -> Link:
        link = Link(connection, hello, self._epoll, self._spare)
        self._by_fd[link.fd] = link
        self._epoll.register(link.fd, IN)
        return link

    def _bound(self, link: Link) -> None:
        """Let a link's queue hold one push from each of our slots and one answer to each of the peer's slots."""
        link.limit += self.arena.held.size * len(self.arena.gradients) + link.hello.size * link.hello.parameters

    def _other(self, fd: int) -> None:
        """Serve a descriptor that is no link; an unknown one belonged to a link that closed while its event waited."""
        if fd in self._watched:
            self._delivered = True
            self._watched[fd]()
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        # a bounded number at a time: a flood of connections must not keep the role from its links
        for _ in range(STRANGERS_LIMIT):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                connection.setblocking(False)
                connection = self._admit(connection)
            except OSError as error:
                _log.info("%s refused a link: %s", self.role, error)
                connection.close()
                continue
            link = self._add(connection, Hello(self.job, "", -1))
            link.deadline = monotonic() + HELLO_SECONDS
            self._strangers[link.fd] = link
            if len(self._strangers) > STRANGERS_LIMIT:
                oldest = next(iter(self._strangers.values()))
                self._read(oldest)  # the peer's introduction may have arrived unread
                if not oldest.role:
                    self._lose(oldest, "too many links wait for their introduction")

    def _attend(self, timeout: float | None) -> float | None:
        """Drop failed links, and those without an introduction in time; return how long to wait."""
        failed, self._failed = self._failed, []
        for link in failed:
            self._lose(link, link.error)
        now = monotonic()
        for link in list(self._strangers.values()):
            if link.deadline > now:
                break
            self._read(link)  # the peer's introduction may have arrived in time, while this process was busy
            if link.role:
                continue
            self._lose(link, f"no introduction within {HELLO_SECONDS} s")
        if self._delivered:
            return 0
        if not self._strangers:
            return timeout
        left = max(0.0, next(iter(self._strangers.values())).deadline - now)
        return left if timeout is None else min(left, timeout)

    def _meet(self, link: Link, message: Message) -> None:
        """Admit or refuse a link by its first message."""
        hello = acceptable(message, self.job, self.role, self.incarnation, self._links)
        link.hear(hello)
        old = self._links.get(hello.role)
        # the new link is fully checked before the old one closes: a forged introduction must not cost a good link
        self._borrow(link)
        self._bound(link)
        if old is not None:
            self._lose(old, f"{hello.role} came again, as incarnation {hello.incarnation}")
        if link.closed:
            return  # the role closed this endpoint when it heard of the loss
        del self._strangers[link.fd]
        link.role = hello.role
        self._links[link.role] = link

    def _drop_later(self, link: Link, reason: str) -> None:
        """Have the next poll drop a link: `Lost` must not be delivered within a `send`."""
        link.dropped = True
        link.fail(reason)
        self._failed.append(link)

    def _lose(self, link: Link, reason: str, ended: bool = False) -> None:
        """Close a link, and deliver its `Lost` once; `ended` says that the other end closed it."""
        if link.closed:
            return
        self._shut(link)
        if self._links.get(link.role) is link:
            del self._links[link.role]
            self._delivered = True
            lost = Arrival(link.role, Lost(reason, link.hello.incarnation))
            (self.deliver_end if ended else self.deliver)(lost)
        else:
            _log.info("%s dropped a link: %s", self.role, reason)

    def _shut(self, link: Link) -> None:
        del self._by_fd[link.fd]
        self._strangers.pop(link.fd, None)
        link.shut()

    def _read(self, link: Link) -> None:
        """Receive from a ready link, and deliver complete messages."""
        if link.dropped:
            return
        room = link.room
        count = self._receive(link)
        if count is None:
            return
        if room is not None and link.arrival is not None:
            if count < len(room):
                link.room = room[count:]
                return
            count -= len(room)
            # bytes beyond the payload are in the scratch buffer, and are parsed below
            arrival, link.room, link.arrival = link.arrival, None, None
            self._delivered = True
            self.deliver(arrival)
        try:
            if link.rest:
                link.rest += self._scratch[:count]
                with memoryview(link.rest) as data:
                    used = self._parse(link, data)
                del link.rest[:used]
            elif count:
                used = self._parse(link, self._scratch[:count])
                if used < count:
                    link.rest += self._scratch[used:count]
        except RemoteProtocolError as error:
            self._lose(link, str(error))
        if room is None and link.room is not None:
            self._read(link)  # the rest of a long payload has probably arrived already

    def _receive(self, link: Link) -> int | None:
        """Receive once, first into the buffer of an unfinished payload; return the number of bytes, None for none."""
        room = link.room
        try:
            if room is not None:
                count, *_ = link.socket.recvmsg_into((room, self._scratch))
            elif link.role:
                count = link.socket.recv_into(self._scratch)
            else:
                count = self._receive_first(link)
        except BlockingIOError:
            return None
        except OSError as error:
            self._lose(link, link.error or f"the link to {link.role} broke: {error}", ended=True)
            return None
        if not count:
            inside = " in the middle of a message" if link.rest or room is not None else ""
            self._lose(link, link.error or f"{link.role} closed its link{inside}", ended=True)
            return None
        return count

    def _parse(self, link: Link, data: memoryview) -> int:
        """Deliver the frames at the start of data; return how many bytes they took."""
        position, end = 0, len(data)
        while end - position >= wire.PREFIX.size and not link.dropped:
            body = position + wire.PREFIX.size
            stop = body + wire.length(data[position:body])
            if stop > end:
                if not link.role and stop - position > HELLO_LIMIT:
                    raise RemoteProtocolError(
                        f"an introduction of {stop - position} bytes is over the limit of {HELLO_LIMIT}"
                    )
                break
            message = wire.decode(data[body:stop])
            self.traffic.received[message.traffic] += stop - position
            position = stop
            payload = None
            if not link.role:
                self._meet(link, message)
                continue
            if isinstance(message, Bulk):
                # an answer goes into this role's vectors, a push into those that its sender lends
                if message.is_reply:
                    payload = link.view("here", self.arena, message)
                else:
                    payload = link.view("lent", link.lent, message)
                room = self._landing(payload)
                counts = self.traffic.shared_memory if room is None else self.traffic.received
                counts[message.traffic] += payload.nbytes
                if room is not None and room.nbytes:
                    have = min(len(room), end - position)
                    room[:have] = data[position : position + have]
                    position += have
                    if have < len(room):
                        link.arrival, link.room = Arrival(link.role, message, payload), room[have:]
                        break
            elif isinstance(message, SlotRequest):
                if wrong := outside(message, link.hello.parameters, link.held):
                    raise RemoteProtocolError(wrong)
            elif isinstance(message, Hello):
                raise RemoteProtocolError(f"{link.role} introduced itself twice")
            self._delivered = True
            self.deliver(Arrival(link.role, message, payload))
        return position
