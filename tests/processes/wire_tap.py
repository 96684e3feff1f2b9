"""What stands between the roles of a job and keeps every byte that they say, and what TLS looks like to it."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

BEHIND, BEFORE = "127.0.0.2", "127.0.0.1"
"""Where the roles of a job bind, and where they are told to be: the tap's."""
HANDSHAKE, CHANGE, DATA = 22, 20, 23
"""Kinds of records of TLS."""
CLIENT_HELLO, SERVER_HELLO, SUPPORTED_VERSIONS, TLS_1_3 = 1, 2, 43, 0x0304


@dataclass
class Talk:
    """One connection: what its opener said, and what it was answered."""

    said: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)


class Tap:
    """Passes on whatever comes to some ports of one address to the same ports of another, in a thread of its own."""

    def __init__(self, ports: int) -> None:
        self.talks: list[Talk] = []
        self._ends: dict[socket.socket, tuple[socket.socket, bytearray]] = {}
        self._listeners = self._listen(ports)
        self.port = self._listeners[0].getsockname()[1]
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _listen(self, ports: int) -> list[socket.socket]:
        """Ports that follow upon each other, the first wherever they are free."""
        while True:
            found = [socket.create_server((BEFORE, 0))]
            try:
                found += [socket.create_server((BEFORE, found[0].getsockname()[1] + more)) for more in range(1, ports)]
            except (OSError, OverflowError):
                for one in found:
                    one.close()
            else:
                return found

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._stopped, *self._listeners, *self._ends], [], [])
            if self._stopped in ready:
                return
            for one in ready:
                if one in self._listeners:
                    self._open(one)
                elif one in self._ends:
                    self._pass_on(one)

    def _open(self, listener: socket.socket) -> None:
        opener, _ = listener.accept()
        try:
            other = socket.create_connection((BEHIND, listener.getsockname()[1]))
        except OSError:
            opener.close()
            return
        talk = Talk()
        self.talks.append(talk)
        self._ends |= {opener: (other, talk.said), other: (opener, talk.answered)}

    def _pass_on(self, end: socket.socket) -> None:
        other, kept = self._ends[end]
        try:
            data = end.recv(1 << 20)
            kept += data
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (end, other):
                del self._ends[one]
                one.close()

    def close(self) -> None:
        """Pass on nothing more."""
        self._stop.send(b"stop")
        self._thread.join()
        for one in (self._stop, self._stopped, *self._listeners, *self._ends):
            one.close()


@contextlib.contextmanager
def tap(ports: int) -> Iterator[Tap]:
    """A tap before so many ports, for as long as this lasts."""
    made = Tap(ports)
    try:
        yield made
    finally:
        made.close()


def records_of(stream: bytes) -> list[tuple[int, bytes]]:
    """The records of TLS that a stream consists of, the last perhaps cut off; a ValueError where it is none."""
    found = []
    while len(stream) >= 5:
        kind, version, length = struct.unpack_from(">BHH", stream)
        if kind not in (HANDSHAKE, CHANGE, DATA, 21) or version not in (0x0301, 0x0303) or length > (16 << 10) + 256:
            raise ValueError(f"these bytes are no record of TLS: {bytes(stream[:16])!r}")
        found.append((kind, bytes(stream[5 : 5 + length])))
        stream = stream[5 + length :]
    return found


def agreed(talk: Talk) -> tuple[int, int]:
    """The version of TLS and the cipher of a talk; a ValueError where more than two greetings is in the open."""
    said, answered = records_of(bytes(talk.said)), records_of(bytes(talk.answered))
    for greeting, records in ((CLIENT_HELLO, said), (SERVER_HELLO, answered)):
        (kind, body), *rest = records
        if (kind, body[0]) != (HANDSHAKE, greeting) or {kind for kind, _ in rest} - {CHANGE, DATA}:
            raise ValueError(
                f"records of the kinds {[kind for kind, _ in records][:9]}, the first of which is {body[:1]!r}"
            )
    hello = answered[0][1]
    at = 4 + 2 + 32  # its header, the version as it was before 1.3, the chance
    at += 1 + hello[at]  # the session
    cipher = int.from_bytes(hello[at : at + 2], "big")
    at += 2 + 1 + 2  # and the compression, and how long the extensions are
    while at < len(hello):
        kind, length = struct.unpack_from(">HH", hello, at)
        if kind == SUPPORTED_VERSIONS:
            return int.from_bytes(hello[at + 4 : at + 4 + length], "big"), cipher
        at += 4 + length
    raise ValueError("the version is of before TLS 1.3")
