"""Identity of a connection's other end: a role by its TLS certificate, or a process of this user at a Unix socket.

The module imports nothing of the protocol, so that a process can ask for admission to a job without torch.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import ssl
import struct
import termios
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from distbelief.core.messages import CONTROL, Traffic

MUTE = (
    "its port answers, but no bytes come: it is stopped, a proxy or firewall answers in its place, or the way "
    "takes only shorter packets than are sent (try a smaller MTU: ip link set DEV mtu 1280)"
)
"""Reason and remedy if a peer accepts a connection and sends nothing."""
RECORD = 16 << 10
"""Most bytes of a TLS record; shorter buffers are sent together in one."""
_PIECE = 256 << 10  # bytes of a long payload in one write, which succeeds as a whole or not at all
_AROUND = 22  # bytes of a record besides its content: its header, its kind and its tag
_TURN = 4 << 20  # most bytes received at once, since other links wait
_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError)

Bytes = bytes | bytearray | memoryview
_PEER = struct.Struct("3i")  # pid, uid, gid
_INFO = struct.Struct("@120x2Q")  # offset in the kernel's tcp_info of tcpi_bytes_acked and tcpi_bytes_received


class Identity(msgspec.Struct, frozen=True):
    """Certificate and key that prove a role. All three are PEM."""

    authority: str
    """The certificate of the job's authority."""
    certificate: str
    key: str
    """Secret key, which only its process has; it is on no disk."""

    def __repr__(self) -> str:
        return "Identity(...)"  # a key must not appear in a message or a log


class TlsSocket(ssl.SSLSocket):
    """TLS connection with the calls of a plain socket, which raise BlockingIOError when a plain one would."""

    # OpenSSL requires a failed write to be repeated with the same bytes, perhaps with more: the same queue begins with
    # the same chunks. Epoll does not see bytes that are already decrypted, so a read takes all of them: its buffer has
    # `RECORD` bytes beyond the payload's. An end without `close_notify` is treated like any other end, since messages
    # state their lengths.

    peer = ""
    """Role of the other end, by its certificate; "" until the handshake is done."""
    traffic = Traffic()
    """Counts of the bytes that TLS adds; an endpoint replaces them by its own."""

    def greet(self) -> None:
        """Continue the handshake; raise BlockingIOError until it is done."""
        try:
            self.do_handshake()
        except _WAIT:
            raise BlockingIOError from None
        except TimeoutError:
            raise TimeoutError(MUTE) from None
        sent, received = _carried(self)
        self.traffic.sent[CONTROL] += sent
        self.traffic.received[CONTROL] += received
        certificate: Any = self.getpeercert()
        # the job's authority writes the role into every certificate
        self.peer = next(value for part in certificate["subject"] for name, value in part if name == "commonName")

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as much as the socket takes at once; return the number of bytes."""
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Bytes], *_: object) -> int:  # type: ignore[override]  # neither ancillary data nor an address
        """Send as much of several buffers as the socket takes at once; return the number of bytes."""
        sent = 0
        try:
            for chunk in _chunks(buffers):
                count = self.write(chunk)
                self.traffic.sent[CONTROL] += -(-count // RECORD) * _AROUND
                sent += count
        except _WAIT:
            if not sent:
                raise BlockingIOError from None
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive one record; return the number of bytes, 0 at the end."""
        try:
            return self._take(buffer)
        except _WAIT:
            raise BlockingIOError from None

    def recvmsg_into(self, buffers: Sequence[memoryview], *_: object) -> tuple[int]:  # type: ignore[override]  # as above
        """Receive the available bytes into the first buffer, and the rest of the last record into the second."""
        room, beyond = buffers
        got = 0
        try:
            while got < min(len(room), _TURN):
                count = self._take(room[got:])
                if not count:
                    return (got,)
                got += count
            if got == len(room) and self.pending():
                got += self._take(beyond)
        except _WAIT:
            if not got:
                raise BlockingIOError from None
        return (got,)

    def _take(self, room: bytearray | memoryview) -> int:
        begins = not self.pending()
        count = int(self.read(len(room), room))
        if begins and count:
            self.traffic.received[CONTROL] += _AROUND
        return count


def _carried(connection: ssl.SSLSocket) -> tuple[int, int]:
    """Return the bytes that a connection has sent, and those received and read, as the kernel counts them."""
    # at the opening end, the kernel counts the opening packet as a byte
    counted = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    acknowledged, received = _INFO.unpack(counted)
    left, unread = array.array("i", [0]), array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, left)
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, unread)
    return acknowledged + left[0] - (not connection.server_side), received - unread[0]


def _chunks(buffers: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the chunks to write: short buffers joined up to a record, long ones in pieces."""
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        room = RECORD - len(joined)
        if len(view) < room:
            joined += view
            continue
        if joined:
            yield joined + view[:room]
            view, joined = view[room:], bytearray()
        for at in range(0, len(view), _PIECE):
            yield view[at : at + _PIECE]
    if joined:
        yield joined


def context(purpose: int, identity: Identity) -> ssl.SSLContext:
    """Return the context of a handshake: this role's certificate, and the authority that it trusts."""
    tls = ssl.SSLContext(purpose)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.check_hostname = False  # certificates name roles, which may run on any host
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.sslsocket_class = TlsSocket
    tls.load_verify_locations(cadata=identity.authority)
    prove(tls, identity)
    return tls


def prove(tls: ssl.SSLContext, identity: Identity) -> None:
    """Let a context use a certificate and its key."""
    # `ssl` reads keys only from files, and this key must not be on a disk
    secret = os.memfd_create("distbelief identity", os.MFD_CLOEXEC)
    try:
        os.write(secret, (identity.certificate + identity.key).encode())
        tls.load_cert_chain(f"/proc/self/fd/{secret}")
    finally:
        os.close(secret)


def check_user(connection: socket.socket) -> int:
    """Return the id of the process at the other end of a Unix socket; raise a `PermissionError` if another user's."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise PermissionError(
            f"the process at the other end runs as user {uid}, this one as {os.getuid()}; run both as one user"
        )
    return int(pid)
