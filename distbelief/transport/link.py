"""One connection of a socket carrier: its queue, the arriving frame and payload, and their limits."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from time import monotonic

import torch

from distbelief.core.effects import Arrival
from distbelief.core.messages import Bulk, Hello, Message
from distbelief.errors import RemoteProtocolError
from distbelief.sharding.layout import Range
from distbelief.transport.base import EMPTY, Arena, outside

FRAMES_LIMIT = 64 << 20
"""Most bytes of messages queued for a peer that does not read, besides payloads for which both ends have slots."""
VIEWS_LIMIT = 1024
"""Most ranges of a link for which tensors are kept."""
SPARE_LIMIT = 4
"""Most buffers kept for copies of answers that wait to be sent."""

CONNECT_SECONDS = 10.0
HELLO_SECONDS = 5.0
"""Time limit for the introduction on a new link."""
HELLO_LIMIT = 4096
"""Longest introduction in bytes."""
STRANGERS_LIMIT = 64
"""Most links without an introduction; beyond that the oldest is dropped."""
VECTOR_LIMIT = 1 << 36
"""Longest vector in bytes that a peer may lend."""
SLOTS_LIMIT = 16
"""Most vectors of each kind that a peer may lend."""

IN, OUT = select.EPOLLIN, select.EPOLLOUT
_PIECES = 256  # buffers of one sendmsg; the kernel takes 1024


class Link:
    """One connection. Its endpoint reads from it; the link itself writes whenever the socket takes more."""

    def __init__(self, connection: socket.socket, hello: Hello, epoll: select.epoll, spare: list[bytearray]) -> None:
        self.socket = connection
        self.fd = connection.fileno()
        self.role = hello.role
        self.hello, self.held = hello, Range(0, 0)
        self.hear(hello)
        self.lent = EMPTY  # the peer's vectors in this process
        self.deadline = 0.0  # when its introduction must have come
        self.fds: list[int] = []  # descriptors that came with the introduction
        self.limit = FRAMES_LIMIT
        self.queue: deque[bytes | memoryview] = deque()
        self.queued = 0
        self.dirty = False  # true if messages were queued since the last flush
        self.writing = False  # True while epoll watches for room in the socket
        self.unsettled = False  # true if the queue may refer to an answer's memory
        self.rest = bytearray()  # beginning of a frame that is arriving
        self.arrival: Arrival | None = None  # message whose payload is arriving
        self.room: memoryview | None = None  # room for the rest of that payload
        self.views: dict[tuple[str, int, int, int], torch.Tensor] = {}
        self.error = ""  # why nothing more can be sent
        self.closed = False
        self.dropped = False  # true once it is closed, or will be by the next poll: it delivers nothing more
        self._epoll = epoll
        self._spare = spare

    def hear(self, hello: Hello) -> None:
        """Note who is at the other end; the role is "" before the introduction."""
        self.hello = hello
        self.held = Range(hello.start, hello.start + hello.size)

    def flush(self) -> None:
        """Send queued data, as much as the socket takes at once."""
        queue = self.queue
        try:
            while queue:
                if len(queue) == 1:
                    sent = self.socket.send(queue[0])
                    count = 1
                    if type(queue[0]) is bytes and sent == len(queue[0]):  # the usual case, which must be quick
                        self.queued -= sent
                        queue.clear()
                        break
                else:
                    pieces = list(islice(queue, _PIECES))
                    sent = self.socket.sendmsg(pieces)
                    count = len(pieces)
                self.queued -= sent
                if not self._drop(sent, count):
                    break
        except BlockingIOError:
            pass  # epoll tells when there is room again
        except OSError as error:
            self.fail(str(error))
        if bool(queue) is not self.writing:
            self.writing = not self.writing
            self._epoll.modify(self.fd, IN | OUT if self.writing else IN)

    def _drop(self, sent: int, count: int) -> bool:
        """Remove the sent bytes of the first `count` pieces; return whether all were sent."""
        queue = self.queue
        for _ in range(count):
            piece = queue[0]
            if len(piece) > sent:
                if sent:
                    queue[0] = memoryview(piece)[sent:]
                return False
            sent -= len(piece)
            queue.popleft()
            # reused: copies of answers have few sizes, and allocating megabytes costs more than the copy
            if isinstance(piece, memoryview) and isinstance(piece.obj, bytearray) and len(self._spare) < SPARE_LIMIT:
                self._spare.append(piece.obj)
        return True

    def settle(self) -> None:
        """Copy the queued parts of answers."""
        self.unsettled = False
        if not self.writing:
            self.flush()
        for index, piece in enumerate(self.queue):
            # a read-only view belongs to an answer: a push is not changed before its receiver has it
            if isinstance(piece, memoryview) and piece.readonly and not isinstance(piece.obj, bytes):
                size = len(piece)
                fits = [buffer for buffer in self._spare if len(buffer) >= size]
                copy = min(fits, key=len) if fits else bytearray(size)
                if fits:
                    self._spare.remove(copy)
                self.queue[index] = memoryview(copy)[:size]
                memoryview(copy)[:size] = piece

    def view(self, kind: str, arena: Arena, message: Bulk) -> torch.Tensor:
        """Return a message's range of an arena, as the same object each time; refuse a range outside the arena."""
        # a shard keeps views of a payload, to recognise the payload if it is sent again
        key = (kind, message.slot, message.start, message.stop)
        known = self.views.get(key)
        if known is None:
            if wrong := outside(message, len(arena.vectors(message)), arena.held):
                raise RemoteProtocolError(wrong)
            if len(self.views) >= VIEWS_LIMIT:
                self.views.clear()
            known = self.views[key] = arena.part(message)
        return known

    def fail(self, reason: str) -> None:
        """Stop sending; data from the peer can still be read."""
        self.error = self.error or reason
        self.queue.clear()
        self.queued = 0
        self.unsettled = False

    def shut(self) -> None:
        """Close the connection, and drop all queued data."""
        self.closed = self.dropped = True
        self.socket.close()
        self.fail("closed")
        self.views.clear()
        self.room = self.arrival = None
        self.lent = EMPTY


@contextmanager
def closed_on_error(connection: socket.socket) -> Iterator[None]:
    """Close a connection where the block fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def drain(links: Iterable[Link], deadline: float) -> None:
    """Send the links' queued messages, until a deadline."""
    writing = select.poll()
    waiting: dict[int, Link] = {}
    for link in links:
        link.flush()
        if link.queue:
            waiting[link.fd] = link
            writing.register(link.fd, select.POLLOUT)
    while waiting and (left := deadline - monotonic()) > 0:
        for fd, _ in writing.poll(left * 1000):
            waiting[fd].flush()
            if not waiting[fd].queue:
                del waiting[fd]
                writing.unregister(fd)


def acceptable(message: Message, job: str, role: str, incarnation: int, links: Mapping[str, Link]) -> Hello:
    """Return the introduction on a new link to a role that has these links; refuse any other first message."""
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"the first message of a link was a {type(message).__name__}, not a Hello")
    if message.job != job:
        raise RemoteProtocolError(f"{message.role} is of job {message.job!r}, but this is {job!r}")
    if not message.role or message.role == role or message.incarnation < 0:
        raise RemoteProtocolError(
            f"a link to {role} cannot come from incarnation {message.incarnation} of {message.role!r}"
        )
    # a later incarnation, which does not know the sender's plan, may have this address now
    if message.peer not in (-1, incarnation):
        raise RemoteProtocolError(
            f"{message.role} looks for incarnation {message.peer} of {role}, but this is {incarnation}"
        )
    if not (
        0 <= message.size <= VECTOR_LIMIT
        and 0 <= message.start <= VECTOR_LIMIT
        and 0 <= message.gradients <= SLOTS_LIMIT
        and 0 <= message.parameters <= SLOTS_LIMIT
    ):
        lent = f"{message.gradients} and {message.parameters} vectors of {message.size} bytes from {message.start} on"
        raise RemoteProtocolError(
            f"{message.role} lends {lent}; at most {SLOTS_LIMIT} of each kind and {VECTOR_LIMIT} bytes are allowed"
        )
    old = links.get(message.role)
    if old is not None and (old.hello.incarnation < 0 or message.incarnation <= old.hello.incarnation):
        raise RemoteProtocolError(
            f"{message.role} has a link already, as incarnation {old.hello.incarnation}; only a higher one may "
            "replace it"
        )
    return message
