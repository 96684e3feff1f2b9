"""Endpoints over sockets, and strangers at their addresses."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from patience import SECONDS

from distbelief.core.conversations.initialising import Ready
from distbelief.core.effects import Arrival
from distbelief.places.join.authority import Authority
from distbelief.transport import tls
from distbelief.transport.secure import Identity
from distbelief.transport.shared import SharedEndpoint
from distbelief.transport.sockets import SocketEndpoint
from distbelief.transport.tcp import TcpEndpoint
from distbelief.transport.tls import TlsEndpoint

AUTHORITY = Authority("job")
ROLES = "shard 0", "shard 1", "replica 0", "replica 1", "evaluator"
IDENTITIES = {role: AUTHORITY.issue(role) for role in ROLES}
CARRIERS: dict[str, Callable[..., Any]] = {
    "shared": SharedEndpoint,
    "tcp": TcpEndpoint,
    "tls": lambda role, job: TlsEndpoint(role, job, identity=IDENTITIES[role]),
}


def end_of(role: str, identity: Identity | None = None) -> TlsEndpoint:
    """The endpoint of a role over TLS."""
    return TlsEndpoint(role, "job", identity=identity or IDENTITIES[role])


def meet(opener: SocketEndpoint, listener: SocketEndpoint, address: str, role: str = "shard 0") -> None:
    """Open a link; the other end is polled meanwhile, as its driver would."""
    failed: list[Exception] = []

    def connect() -> None:
        try:
            opener.connect(role, address)
        except Exception as error:
            failed.append(error)

    opening = threading.Thread(target=connect)
    opening.start()
    while opening.is_alive():
        listener.poll(0.0005)
    opening.join()
    if failed:
        raise failed[0]


def raw(address: str) -> socket.socket:
    """A bare connection to where an endpoint listens."""
    if address.startswith("unix:@"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address.removeprefix("unix:@"))
    else:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(SECONDS)
    return connection


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed; what it has said before (an alert, say) is passed over."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def stranger(identity: Identity | None) -> ssl.SSLContext:
    """What a stranger opens a link with, who believes everybody."""
    made = tls.context(ssl.PROTOCOL_TLS_CLIENT, identity) if identity else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.sslsocket_class, made.check_hostname, made.verify_mode = ssl.SSLSocket, False, ssl.CERT_NONE
    return made


def client_hello() -> bytes:
    """What a handshake begins with."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        stranger(IDENTITIES["replica 0"]).wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


class Target:
    """A listening shard with a link to the evaluator, which must outlive whatever a stranger does."""

    def __init__(self, carrier: str = "tls") -> None:
        self.endpoint, self.good = (CARRIERS[carrier](role, "job") for role in ("shard 0", "evaluator"))
        self.got: list[Arrival] = []
        self.endpoint.deliver = self.got.append
        self.address = self.endpoint.listen()
        meet(self.good, self.endpoint, self.address)

    def raw(self) -> socket.socket:
        return raw(self.address)

    def until(self, reached: Callable[[], object]) -> None:
        end = monotonic() + SECONDS
        while not reached():
            assert monotonic() < end, self.got
            self.endpoint.poll(0.0005)

    def goes_on(self) -> None:
        """Nobody was told of the stranger, and the good link works."""
        assert self.got == []
        self.good.send("shard 0", Ready(()))
        self.good.poll(0)
        self.until(lambda: self.got)
        assert [(arrival.sender, arrival.event) for arrival in self.got] == [("evaluator", Ready(()))]

    def close(self) -> None:
        self.good.close()
        self.endpoint.close()
