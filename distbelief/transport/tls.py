"""TLS over the carrier between hosts: both ends prove their roles by certificates of the job's own authority."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from distbelief.core.messages import Hello, Message
from distbelief.errors import RemoteProtocolError
from distbelief.transport.link import Link
from distbelief.transport.tcp import TcpEndpoint

HANDSHAKE_SECONDS = 60.0
"""How long whoever opens a link waits for the other end, which may be busy (writing a checkpoint, say)."""
RECORD = 16 << 10
"""Most bytes of a record of TLS; what is shorter goes joined."""
_PIECE = 256 << 10  # of a long payload: what one write takes whole or not at all
_TURN = 4 << 20  # received at once, however fast a peer sends: others wait
_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError)

Bytes = bytes | bytearray | memoryview


class Identity(msgspec.Struct, frozen=True):
    """By what a role proves who it is. All three are PEM."""

    authority: str
    """The certificate of the job's authority."""
    certificate: str
    key: str
    """Its own secret: it goes to its process only, and to no disk."""

    def __repr__(self) -> str:
        return "Identity(...)"  # the key belongs in no message and no log


class TlsEndpoint(TcpEndpoint):
    """A TCP endpoint whose links are TLS 1.3, each end with a certificate of the job's authority that names its role.

    The handshake is part of a stranger's introduction: all of it has to come within `HELLO_SECONDS`. `connect` waits for the other end, so somebody
    must be polling that.

    Args:
        role: this role.
        job: the job's name; links of others are refused.
        incarnation: how many times this role was restarted.
        identity: the certificate of this role.
        congestion: as `TcpEndpoint`.
    """

    def __init__(self, role: str, job: str, incarnation: int = 0, *, identity: Identity, congestion: str = "cubic") -> None:
        super().__init__(role, job, incarnation, insecure=False, congestion=congestion)
        self._dialling = context(ssl.PROTOCOL_TLS_CLIENT, identity)
        self._accepting = context(ssl.PROTOCOL_TLS_SERVER, identity)
        self._accepting.num_tickets = 0  # nobody resumes a session

    def _check_network(self, address: str, host: str) -> None:
        """Any network will do."""

    def _dial(self, role: str, address: str) -> socket.socket:
        plain = super()._dial(role, address)
        try:
            connection = self._dialling.wrap_socket(plain, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        assert isinstance(connection, TlsSocket)
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            connection.greet()
            if connection.peer != role:
                raise PermissionError(f"the certificate there is of {connection.peer!r}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _admit(self, connection: socket.socket) -> socket.socket:
        return self._accepting.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _receive_first(self, link: Link) -> int:
        connection = link.socket
        assert isinstance(connection, TlsSocket)
        if not connection.peer:
            connection.greet()
        return connection.recv_into(self._scratch)  # a whole record: nothing is left where epoll cannot see it

    def _meet(self, link: Link, message: Message) -> None:
        assert isinstance(link.socket, TlsSocket)
        if isinstance(message, Hello) and message.role != link.socket.peer:
            raise RemoteProtocolError(f"who says that it is {message.role!r} has the certificate of {link.socket.peer!r}")
        super()._meet(link, message)


class TlsSocket(ssl.SSLSocket):
    """A connection under TLS with the calls of a plain socket, which raise BlockingIOError where a plain one would.

    A failed write is tried again with the same bytes and perhaps more, as OpenSSL demands: the same queue begins with the same chunks. A read leaves
    nothing decrypted behind, given `RECORD` bytes of room after the payload's. An end without a farewell (`close_notify`) is an end: messages say
    how long they are, so one that was cut off is noticed without it.
    """

    peer = ""
    """The role that the other end has proved to be; "" until the handshake is done."""

    def greet(self) -> None:
        """Go on with the handshake; raises BlockingIOError until it is done."""
        try:
            self.do_handshake()
        except _WAIT:
            raise BlockingIOError from None
        certificate: Any = self.getpeercert()
        self.peer = next(value for part in certificate["subject"] for name, value in part if name == "commonName")  # the authority names every role

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as much as is taken at once; returns how much that was."""
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Bytes], *_: object) -> int:  # type: ignore[override]
        """Send as much of several buffers as is taken at once; returns how much that was."""
        sent = 0
        try:
            for chunk in _chunks(buffers):
                sent += self.write(chunk)
        except _WAIT:
            if not sent:
                raise BlockingIOError from None
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive what one record holds; returns how much that was, 0 at the end."""
        try:
            return self._take(buffer)
        except _WAIT:
            raise BlockingIOError from None

    def recvmsg_into(self, buffers: Sequence[memoryview], *_: object) -> tuple[int]:  # type: ignore[override]
        """Receive into the first buffer all that is there for it, and into the second what its last record holds beyond that."""
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

    def _take(self, room: Any) -> int:
        return int(self.read(len(room), room))


def _chunks(buffers: Iterable[Bytes]) -> Iterator[Bytes]:
    """What is written at once: short buffers joined up to a record, long ones in pieces."""
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
    """What a handshake needs: our certificate, and whose others we believe."""
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # certificates are of roles, which may run anywhere
    made.verify_mode = ssl.CERT_REQUIRED
    made.sslsocket_class = TlsSocket
    made.load_verify_locations(cadata=identity.authority)
    secret = os.memfd_create("distbelief identity", os.MFD_CLOEXEC)  # `ssl` reads keys from files only, and no disk is to see this one
    try:
        os.write(secret, (identity.certificate + identity.key).encode())
        made.load_cert_chain(f"/proc/self/fd/{secret}")
    finally:
        os.close(secret)
    return made
