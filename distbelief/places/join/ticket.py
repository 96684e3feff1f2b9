"""Tickets, which hold a job's addresses and credentials; and the server that admits their holders."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import ssl
import stat
import struct
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from distbelief.core import roles
from distbelief.errors import UsageError
from distbelief.places.channel import cut_off
from distbelief.places.cluster import network
from distbelief.places.cluster.launched import Launched
from distbelief.transport.addresses import cut
from distbelief.transport.secure import Identity, TlsSocket, context

GUEST = "guest"
"""Name in a ticket's certificate, which is not the name of a role."""
VERSION = metadata.version("distbelief")
"""Version that both ends must run: their messages depend on more than the wire format."""
LIMIT = 1 << 16
"""Longest ticket, in bytes."""
PATIENCE = 5.0
"""Limit in seconds for one client of a server, in all."""
CROWD = 64
"""Most clients that are served at once; one more pushes out the one that has taken longest."""
PAUSE = 0.1
"""Pause in seconds before the next client is accepted, if this machine is out of resources."""
_LENGTH = struct.Struct("<I")


class Ticket(msgspec.Struct, frozen=True):
    """Ticket that lets its holder take part in a job; it must be kept like a password."""

    job: str
    where: list[str]
    """Addresses `host:port` of the job, at least one of which answers."""
    secret: str
    identity: Identity | None
    """Certificate of the job's authority, with its key, if links are TLS."""
    holder: Launched | None = None
    """The agent that it is for, if it is for one alone."""

    @property
    def text(self) -> bytes:
        """Contents of the ticket's file: one line."""
        return msgspec.json.encode(self) + b"\n"


def read_ticket(path: str | Path, private: bool = False) -> Ticket:
    """Return the ticket in a file, or on the next line of standard input.

    Args:
        path: the path of the file; "-" for standard input.
        private: whether to refuse a file that others than this user could have read or written. This is needed where
            others can guess the file's name: they could draw this process into a job of theirs.

    Raises:
        UsageError: there is no ticket there.
    """
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            status = os.fstat(file.fileno())
            if private and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
                raise UsageError(
                    f"{path} is of user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}; a ticket is of user "
                    f"{os.getuid()} alone (600): remove it, and name another shared folder with --tickets"
                )
            return msgspec.json.decode(file.readline(LIMIT) if path == "-" else file.read(LIMIT), type=Ticket)
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
    """Connect to the process that made a ticket, at the first of its addresses that answers.

    Raises:
        OSError: none answers; the message names the addresses that were tried.
    """
    answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for where in ticket.where:
        threading.Thread(target=lambda at: answers.put((at, network.attempt(at))), args=(where,), daemon=True).start()
    failed = []
    for _ in ticket.where:
        where, why = answers.get()
        try:
            if not why:
                return connect(where, ticket.identity)
        except (OSError, ValueError) as error:  # an older ticket, or the address of another process
            why = str(error)
        failed.append(f"{where} ({why})")
    raise ConnectionError(", ".join(failed))


def connect(where: str, identity: Identity | None) -> socket.socket:
    """Connect to a ticket server; by TLS, if there is an identity.

    Raises:
        OSError: it does not answer, or does not belong to that job.
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
    """Server that admits the holders of tickets, in threads of its own, until it is closed.

    Args:
        listener: the socket that clients connect to; it is closed with the server.
        take: handles the connection of each client; by TLS, the client has proved that it is a guest.
        keeps: whether `take` keeps the connection, which is closed otherwise.
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
        """Stop serving: cut off the clients, and wait for their threads, 5 s at most."""
        self._open = False
        cut_off(self._listener)  # closing alone does not wake the thread that waits there
        self._listener.close()
        end = time.monotonic() + PATIENCE
        self._server.join(PATIENCE)
        answering = [*self._visitors.items()]
        for visitor, _ in answering:
            cut_off(visitor)
        for _, thread in answering:
            thread.join(max(0.0, end - time.monotonic()))

    def _serve(self) -> None:
        while self._open:
            try:
                visitor, _ = self._listener.accept()
            except OSError:  # the listener is closed, or no descriptor is free for the moment
                time.sleep(PAUSE if self._open else 0.0)
                continue
            self._visitors[visitor] = threading.Thread(target=self._answer, args=(visitor,), name="guest", daemon=True)
            for slowest in [*self._visitors][: -self._crowd]:
                cut_off(slowest)
            try:
                self._visitors[visitor].start()
            except RuntimeError:  # no more threads
                del self._visitors[visitor]
                visitor.close()

    def _answer(self, visitor: socket.socket) -> None:
        late = threading.Timer(PATIENCE, cut_off, [visitor])
        connection, kept = visitor, False
        try:
            try:
                late.start()
            except RuntimeError:  # no more threads
                return
            connection = socket.socket(fileno=os.dup(visitor.fileno()))
            connection.settimeout(PATIENCE)
            if self._context:
                connection = self._context.wrap_socket(connection, server_side=True)
                connection.greet()  # type: ignore[attr-defined]  # a TlsSocket: the context makes no other
                if connection.peer != GUEST:  # type: ignore[attr-defined]  # as above
                    return
            if self._keeps:  # from here on neither the timer nor `close` cuts it off
                late.cancel()
                self._visitors.pop(visitor)
            self._take(connection)
            kept = self._keeps
        except (OSError, ValueError):
            return  # the client must connect again, with a valid request
        finally:
            late.cancel()
            if not kept:
                connection.close()
            visitor.close()
            self._visitors.pop(visitor, None)


def say(connection: socket.socket, word: msgspec.Struct) -> None:
    """Send a message to the other end of a ticket's connection."""
    data = msgspec.msgpack.encode(word)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def hear(connection: socket.socket, limit: int) -> bytes:
    """Receive a message of at most so many bytes; the other end waits for the answer before it sends more.

    Raises:
        OSError: there is none, or it is longer.
    """
    with connection.makefile("rb") as file:
        head = file.read(_LENGTH.size)
        [length] = _LENGTH.unpack(head) if len(head) == _LENGTH.size else [1]
        if length > limit:
            raise ConnectionError(f"a message of {length} bytes is over the limit of {limit}")
        data = file.read(length)
    if len(data) < length:
        raise ConnectionError("the link was closed")
    return data
