"""Channel between a supervisor and a process, or between a supervisor and the agent of another host."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from distbelief.errors import RemoteProtocolError
from distbelief.places.messages import ChannelMessage, Failed, HostMessage, PredictionMessage, ProcessMessage
from distbelief.transport.secure import RECORD, TlsSocket

MESSAGE_LIMIT = 1 << 24
"""Longest message on a channel, in bytes."""
TEXT_LIMIT = 8000
"""Longest text of a failure, in characters. A message written in one piece is never left half written."""
BEAT_SECONDS = 1.0
"""Seconds between two beats of an agent."""
SILENCE_SECONDS = 45.0
"""Seconds without a beat after which the other end counts as gone. After a cable was cut for 15 s, messages arrive
again within 30 s. Links between roles wait at least as long for a peer.
"""
_PIECE = 1 << 16
_MOST = 1 << 22
"""Number of bytes waiting for one end, beyond which no more are read from the other."""
PARTING_SECONDS = 5.0
"""Limit in seconds for sending the last bytes."""

_encode = msgspec.msgpack.Encoder().encode
OF_PROCESS: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(ProcessMessage).decode
OF_HOST: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(HostMessage).decode
OF_PREDICTION: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(PredictionMessage).decode


class Channel:
    """One end of a channel. Each message is preceded by its length in 4 bytes; nothing is pickled.

    Args:
        connection: the connection, of this channel alone.
        decode: the decoder of the other end's messages.
    """

    def __init__(self, connection: Connection, decode: Callable[[bytes], ChannelMessage] = OF_PROCESS) -> None:
        self.connection, self._decode = connection, decode

    def say(self, message: ChannelMessage) -> None:
        """Send a message; do nothing if the other end is gone, or this one is closed."""
        if isinstance(message, Failed) and len(message.text) > TEXT_LIMIT:
            message = Failed(message.kind, "..." + message.text[-TEXT_LIMIT:])
        if not self.connection.closed:
            with contextlib.suppress(ConnectionError):
                self.connection.send_bytes(_encode(message))

    def hear(self) -> ChannelMessage | None:
        """Return the next message; None when the other end is gone, even in the middle of a message.

        Raises:
            RemoteProtocolError: the bytes received are not a message.
        """
        try:
            return self._decode(self.connection.recv_bytes(MESSAGE_LIMIT))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the other end sent something that is not a message: {error}") from error
        except (EOFError, OSError):
            return None

    def hear_all(self, take: Callable[[ChannelMessage], None]) -> bool:
        """Pass on every message that has arrived; return False when the other end is gone.

        Raises:
            RemoteProtocolError: the bytes received are not a message.
        """
        try:
            while self.connection.poll():
                if (message := self.hear()) is None:
                    return False
                take(message)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connection; the other end notices it."""
        self.connection.close()


def cut_off(connection: socket.socket) -> None:
    """End the traffic on a connection, or at a listener, without closing it.

    A thread that waits there wakes.
    """
    with contextlib.suppress(OSError):  # on the socket below TLS, since another thread may be using the state of TLS
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Bridge:
    """Carrier of bytes in both directions between a TLS connection and a socket of this host, until one of them ends.

    The connection ends when the other host has not answered for as long as a channel may be silent.
    """

    def __init__(self, far: TlsSocket, near: socket.socket) -> None:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._far, self._near = far, near
        self._out, self._back = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._run, name="line to another host", daemon=True)
        far.setblocking(False)
        near.setblocking(False)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait so many seconds for its end, and return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cut(self) -> None:
        """End it at once, even if bytes remain to be sent."""
        cut_off(self._far)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._part()
        except OSError:
            pass
        finally:
            self._far.close()
            self._near.close()

    def _turn(self) -> bool:
        """Carry the bytes that are available; return False when an end has sent its last bytes."""
        poll = select.poll()
        for end, comes, goes in ((self._far, self._back, self._out), (self._near, self._out, self._back)):
            poll.register(end, (len(comes) <= _MOST) * select.POLLIN | bool(goes) * select.POLLOUT)
        poll.poll(0 if self._far.pending() and len(self._back) <= _MOST else None)
        near = self._take(self._near, self._out)
        far = self._take(self._far, self._back)
        self._give(self._near, self._back)
        self._give(self._far, self._out)
        if not far:  # pass on its last bytes, as long as the receiver is there
            self._near.setblocking(True)
            self._near.sendall(self._back)
        return near and far

    def _part(self) -> None:
        """Send the last bytes, and read until the other end closes too.

        If this end closed with unread bytes, TCP would reset the connection, and the last bytes could be lost.
        """
        end = time.monotonic() + PARTING_SECONDS
        self._far.settimeout(PARTING_SECONDS)
        while self._out:
            del self._out[: self._far.send(bytes(self._out[:_PIECE]))]
        self._far.shutdown(socket.SHUT_WR)
        while time.monotonic() < end and self._far.recv(_PIECE):
            pass

    def _take(self, end: socket.socket, into: bytearray) -> bool:
        """Read the bytes that are available; return False at the end of the connection.

        A reset counts as the end too: the bytes that came before it are passed on.
        """
        room = bytearray(max(_PIECE, RECORD))
        with contextlib.suppress(BlockingIOError):
            while len(into) <= _MOST:
                try:
                    count = end.recv_into(room)
                except ConnectionError:
                    return False
                if not count:
                    return False
                into += room[:count]
        return True

    def _give(self, end: socket.socket, data: bytearray) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # bytes that still arrive must be read all the same
            while data:
                del data[: end.send(bytes(data[:_PIECE]))]
