"""Carrier inside one host: vectors in shared memory, messages over a Unix socket; nothing has a name on disk.

    | gradient 0 | gradient 1 | ... | parameters 0 | parameters 1 | ...      each begins at a page

Each role has one segment, sealed against shrinking, and sends its descriptor to its peers over the socket. A slot has
one writer at a time. A replica writes its gradients before a push, and again once the push is acknowledged; a shard
writes the requested parameters before it answers. A message follows each write, so the socket orders writes before
reads.

Memory that several processes write is protected by byte-range locks of its file, which the kernel releases when a
process ends.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

import torch

from distbelief.core.messages import Bulk
from distbelief.errors import JobFailed, LocalProtocolError, RemoteProtocolError, UsageError
from distbelief.fabric.waiting import Wait
from distbelief.server.slice import copy_bytes
from distbelief.sharding.layout import Range
from distbelief.transport.base import Arena, plain_arena
from distbelief.transport.link import CONNECT_SECONDS, HELLO_LIMIT, STRANGERS_LIMIT, Link, closed_on_error
from distbelief.transport.secure import check_user
from distbelief.transport.sockets import SocketEndpoint

LOCK_SECONDS = 60.0
"""Limit for the wait for a lock, much longer than a job lets a stopped process (SIGSTOP) live."""
_FLOCK = struct.Struct("hhqqi4x")  # kind, whence, start, length, process
_SCHEME = "unix:@"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Locks:
    """Locks of one process; each is a byte of a file, perhaps beyond its end.

    Args:
        descriptor: of the file, kept open: a process that closes any descriptor of a file loses its locks there.

    >>> locks = Locks(os.memfd_create("example"))
    >>> locks.take(3, lambda: False), locks.holder(3), locks.give(3)
    (True, None, None)
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def take(self, number: int, arrived: Callable[[], bool]) -> bool:
        """Take a lock, within `LOCK_SECONDS`; return False if `arrived`, which is called after longer rests, is
        true.
        """
        if self._try(number):  # the usual case: nobody waits
            return True
        began, wait = time.monotonic(), Wait()
        while not self._try(number):
            if wait.rest():
                if time.monotonic() - began > LOCK_SECONDS:
                    process = self.holder(number)
                    raise JobFailed(
                        f"waited {LOCK_SECONDS:.0f} s for lock {number}, which process {process} holds: is it stuck?"
                    )
                if arrived():
                    return False
        return True

    def give(self, number: int) -> None:
        """Release a lock."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def holder(self, number: int) -> int | None:
        """Return the other process that holds a lock, or None; 0 or less stands for one in another PID namespace."""
        answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        kind, _, _, _, process = _FLOCK.unpack(answer)
        return None if kind == fcntl.F_UNLCK else process

    def _try(self, number: int) -> bool:
        """Take a lock if it is free; return whether it was."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True


class SharedEndpoint(SocketEndpoint):
    """One role's end of the carrier inside one host. Addresses are `unix:@NAME`, as for Linux's abstract sockets."""

    _segment = -1
    finds: Callable[[str], bool] = staticmethod(lambda _: False)
    """Function that returns whether a peer reads a shard's vector in place; then nothing is copied into its arena."""

    def allocate(self, held: Range, gradients: int, parameters: int) -> Arena:
        """Make this role's arena in one anonymous segment, which its peers map."""
        length = _stride(held.size) * (gradients + parameters)
        if not length:
            return super().allocate(held, gradients, parameters)
        self._segment = os.memfd_create(f"distbelief {self.role}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._segment, length)
        fcntl.fcntl(self._segment, fcntl.F_ADD_SEALS, _SEALS)
        self.arena = _map(self._segment, held, gradients, parameters)
        return self.arena

    def listen(self, address: str = "", advertise: str = "") -> str:
        address = address or f"{_SCHEME}distbelief-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_name(address))
            listener.listen(STRANGERS_LIMIT)
        except OSError as error:
            listener.close()
            raise UsageError(
                f"cannot listen at {address}: {error}; choose another name, or none for a fresh one"
            ) from error
        self._listen_on(listener)
        return address

    def close(self) -> None:
        super().close()
        if self._segment >= 0:
            os.close(self._segment)
            self._segment = -1

    def _dial(self, role: str, address: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closed_on_error(connection):
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(_name(address))
            check_user(connection)
        return connection

    def _admit(self, connection: socket.socket) -> socket.socket:
        check_user(connection)
        return connection

    def _introduce(self, connection: socket.socket, frame: bytes) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._segment]))] if self._segment >= 0 else []
        )
        # the descriptor must come with the first bytes: the peer maps the segment before it takes any message
        connection.sendmsg([frame], rights)

    def _receive_first(self, link: Link) -> int:
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        count, ancillary, _, _ = link.socket.recvmsg_into([self._scratch[:HELLO_LIMIT]], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                link.fds += array.array("i", data[: len(data) // 4 * 4])
        return count

    def _shut(self, link: Link) -> None:
        super()._shut(link)
        _close_all(link.fds)

    def _borrow(self, link: Link) -> None:
        hello = link.hello
        length = _stride(hello.size) * (hello.gradients + hello.parameters)
        if not length:
            link.lent = plain_arena(link.held, hello.gradients, hello.parameters)
        else:
            if len(link.fds) != 1:
                raise RemoteProtocolError(
                    f"{hello.role} lends {length} bytes of memory with {len(link.fds)} segments; it must lend one"
                )
            try:
                # a peer that shrinks its segment would crash this process at its next access
                sealed = fcntl.fcntl(link.fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
                have = os.fstat(link.fds[0]).st_size
                if not sealed or have < length:
                    raise RemoteProtocolError(
                        f"{hello.role} lends {length} bytes in a segment of {have} bytes, "
                        f"{'' if sealed else 'not '}sealed"
                    )
                link.lent = _map(link.fds[0], link.held, hello.gradients, hello.parameters)
            except (OSError, ValueError) as error:
                raise RemoteProtocolError(f"the segment of {hello.role} cannot be mapped: {error}") from error
        _close_all(link.fds)

    def _carry(self, link: Link, message: Bulk, payload: torch.Tensor) -> None:
        if message.is_reply:
            if not self.finds(link.role):
                copy_bytes(link.view("to", link.lent, message), payload)
            return
        arena, first = self.arena, message.start - self.arena.held.start
        # a peer reads a push in the slot itself: a payload elsewhere would be lost without notice
        if payload.nbytes and payload.data_ptr() != arena.gradients[message.slot].data_ptr() + first:
            raise LocalProtocolError(
                f"the payload of {message} lies elsewhere than in gradient slot {message.slot} of {self.role}: put it "
                "there first"
            )

    def _landing(self, payload: torch.Tensor) -> None:
        return None  # payloads are read where they lie


def _stride(size: int) -> int:
    """Return the distance of two vectors in a segment, in bytes."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(segment: int, held: Range, gradients: int, parameters: int) -> Arena:
    """Map a segment, and return its vectors; the mapping lasts as long as any of them."""
    stride = _stride(held.size)
    mapping = mmap.mmap(segment, stride * (gradients + parameters))
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    vectors = [
        torch.frombuffer(mapping, dtype=torch.uint8, count=held.size, offset=stride * i)
        for i in range(gradients + parameters)
    ]
    return Arena(tuple(vectors[:gradients]), tuple(vectors[gradients:]), held)


def _name(address: str) -> str:
    if not address.startswith(_SCHEME) or len(address) == len(_SCHEME):
        raise UsageError(f"{address!r} is no address of this carrier; write it as {_SCHEME}NAME")
    return "\0" + address.removeprefix(_SCHEME)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
