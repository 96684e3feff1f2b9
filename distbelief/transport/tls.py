"""TLS over the carrier between hosts: both ends prove their roles by certificates of the job's own authority."""

from __future__ import annotations

import socket
import ssl

from distbelief.core.messages import Hello, Message
from distbelief.errors import RemoteProtocolError
from distbelief.transport.link import Link, closed_on_error
from distbelief.transport.secure import Identity, TlsSocket, context
from distbelief.transport.tcp import TcpEndpoint

HANDSHAKE_SECONDS = 60.0
"""Limit for the handshake, which the other end may delay, for instance by writing a checkpoint."""


class TlsEndpoint(TcpEndpoint):
    """TCP endpoint whose links use TLS 1.3; each end has a certificate of the job's authority that names its role.

    The handshake is part of the introduction, and must end within `HELLO_SECONDS`. `connect` waits `patience` seconds
    for the other end, which must be polled meanwhile.
    """

    def __init__(
        self, role: str, job: str, incarnation: int = 0, *, identity: Identity, patience: float = HANDSHAKE_SECONDS
    ) -> None:
        self._handshake_seconds = patience
        super().__init__(role, job, incarnation, insecure=False)
        self._dialling = context(ssl.PROTOCOL_TLS_CLIENT, identity)
        self._accepting = context(ssl.PROTOCOL_TLS_SERVER, identity)
        self._accepting.num_tickets = 0  # sessions are not resumed

    def _check_network(self, address: str, host: str) -> None:
        """Allow any network: links are encrypted."""

    def _dial(self, role: str, address: str) -> socket.socket:
        plain = super()._dial(role, address)
        with closed_on_error(plain):
            connection = self._dialling.wrap_socket(plain, do_handshake_on_connect=False)
        assert isinstance(connection, TlsSocket)
        connection.traffic = self.traffic
        with closed_on_error(connection):
            connection.settimeout(self._handshake_seconds)
            connection.greet()
            if connection.peer != role:
                raise PermissionError(f"the certificate there is of {connection.peer!r}")
        return connection

    def _admit(self, connection: socket.socket) -> socket.socket:
        admitted = self._accepting.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        assert isinstance(admitted, TlsSocket)
        admitted.traffic = self.traffic
        return admitted

    def _receive_first(self, link: Link) -> int:
        connection = link.socket
        assert isinstance(connection, TlsSocket)
        if not connection.peer:
            connection.greet()
        return connection.recv_into(self._scratch)  # read a whole record, as epoll does not see decrypted bytes

    def _meet(self, link: Link, message: Message) -> None:
        assert isinstance(link.socket, TlsSocket)
        if isinstance(message, Hello) and message.role != link.socket.peer:
            raise RemoteProtocolError(
                f"a role that introduced itself as {message.role!r} has the certificate of {link.socket.peer!r}"
            )
        super()._meet(link, message)
