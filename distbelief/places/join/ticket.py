"""Tickets: the addresses of a job, and proof of whoever comes there; and the server that lets their holders in."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from importlib import metadata

import msgspec

from distbelief.core import roles
from distbelief.errors import UsageError
from distbelief.places.cluster import network
from distbelief.transport.addresses import cut
from distbelief.transport.secure import Identity, TlsSocket, context

GUEST = "guest"
"""Name in a ticket's certificate: not yet a role."""
VERSION = metadata.version("distbelief")
"""Version that both ends must run: what they say is not of the wire alone."""
LIMIT = 1 << 16
"""Longest ticket, in bytes."""
PATIENCE = 5.0
"""Seconds that one at a server may take in all."""
CROWD = 64
"""Most who may be served at once; one more pushes out who has taken longest."""
PAUSE = 0.1
"""Seconds between two tries to let somebody in, where this machine has no room."""


class Ticket(msgspec.Struct, frozen=True):
    """Ticket that lets its holder take part in a job: keep it as you keep a password."""

    job: str
    where: list[str]
    """Addresses as `host:port`, of which one answers."""
    secret: str
    identity: Identity | None
    """A certificate of the job's authority and its key, where links are TLS."""

    @property
    def text(self) -> bytes:
        """Contents of its file."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def read_ticket(path: str) -> Ticket:
    """A ticket from its file.

    Raises:
        UsageError: there is none.
    """
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(LIMIT), type=Ticket)
    except OSError as error:
        raise UsageError(
            f"no ticket can be read from {path}: {error.strerror}; a job that was started with --listen writes it to "
            "its run folder, as ticket.json"
        ) from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{path} is no ticket: {error}; copy the file ticket.json of the run folder as it is"
        ) from error


def reach(ticket: Ticket) -> socket.socket:
    """Connect to whoever made a ticket, at the first of its addresses that answers.

    Raises:
        OSError: nobody answers, with what was tried.
    """
    answers = network.try_all({"": ticket.where}, size=0)[""] if len(ticket.where) > 1 else [""]
    for number, where in enumerate(ticket.where):
        if not answers[number]:
            try:
                return connect(where, ticket.identity)
            except (OSError, ValueError) as error:  # an older ticket, or another's address
                answers[number] = str(error)
    raise ConnectionError(", ".join(f"{where} ({why})" for where, why in zip(ticket.where, answers, strict=True)))


def connect(where: str, identity: Identity | None) -> socket.socket:
    """Connect to a server of tickets; under TLS, where there is an identity.

    Raises:
        OSError: it does not answer, or is not of that job.
    """
    with contextlib.ExitStack() as closing:
        connection = closing.enter_context(socket.create_connection(cut(where), PATIENCE))
        if identity is not None:
            tls = context(ssl.PROTOCOL_TLS_CLIENT, identity)
            connection = closing.enter_context(tls.wrap_socket(connection, do_handshake_on_connect=False))
            assert isinstance(connection, TlsSocket)
            connection.greet()
            if connection.peer != roles.SUPERVISOR:
                raise PermissionError(f"the certificate there is of {connection.peer!r}")
        closing.pop_all()
    return connection


class TicketServer:
    """Lets in whoever holds a ticket, in threads of its own, until it is closed.

    Args:
        listener: where others come; closed with the server.
        identity: proof of this process, where links are TLS.
        take: is handed the connection of each who has proved that he is a guest, where that is by TLS.
        keeps: whether it keeps the connection, which else is closed.
        crowd: the most who are served at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity | None,
        take: Callable[[socket.socket], object],
        *,
        keeps: bool = False,
        crowd: int,
    ) -> None:
        self._listener, self._take, self._keeps, self._crowd = listener, take, keeps, crowd
        self._open = True
        self._visitors: dict[socket.socket, threading.Thread] = {}
        self._context = context(ssl.PROTOCOL_TLS_SERVER, identity) if identity else None
        self._server = threading.Thread(target=self._serve, name="ticket server", daemon=True)
        self._server.start()

    def close(self) -> None:
        """Let nobody in any more: whoever is served is cut off and waited for, 5 s at most."""
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there; closing alone does not
        self._listener.close()
        end = time.monotonic() + PATIENCE
        self._server.join(PATIENCE)
        answering = [*self._visitors.items()]
        for visitor, _ in answering:
            _cut(visitor)
        for _, thread in answering:
            thread.join(max(0.0, end - time.monotonic()))

    def _serve(self) -> None:
        while self._open:
            try:
                visitor, _ = self._listener.accept()
            except OSError:  # closed, or no more descriptors for the moment
                time.sleep(PAUSE if self._open else 0.0)
                continue
            self._visitors[visitor] = threading.Thread(target=self._answer, args=(visitor,), name="guest", daemon=True)
            for slowest in [*self._visitors][: -self._crowd]:
                _cut(slowest)
            try:
                self._visitors[visitor].start()
            except RuntimeError:  # no more threads
                del self._visitors[visitor]
                visitor.close()

    def _answer(self, visitor: socket.socket) -> None:
        late = threading.Timer(PATIENCE, _cut, [visitor])
        connection, kept = socket.socket(fileno=os.dup(visitor.fileno())), False
        try:
            try:
                late.start()
            except RuntimeError:  # no more threads
                return
            connection.settimeout(PATIENCE)
            if self._context:
                connection = self._context.wrap_socket(connection, server_side=True)
                connection.greet()  # type: ignore[attr-defined]  # a connection of ours: the context makes no other
                if connection.peer != GUEST:  # type: ignore[attr-defined]  # as above
                    return
            if self._keeps:  # from here on neither this clock nor `close` cuts it off
                late.cancel()
                kept = bool(self._visitors.pop(visitor))
            self._take(connection)
        except (OSError, ValueError):
            return  # he has to come again, and say it well
        finally:
            late.cancel()
            if not kept:
                connection.close()
            visitor.close()
            self._visitors.pop(visitor, None)


def _cut(connection: socket.socket) -> None:
    """End what is said on a connection; whoever serves it closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, whose state its thread may be using
