"""Channel between whoever starts and watches processes and one of these, or the agent of another host."""

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
"""Longest text of a failure, in characters: a message that is written in one piece is never half there."""
BEAT_SECONDS = 1.0
"""Between two signs of life of an agent."""
SILENCE_SECONDS = 45.0
"""Without a sign of life, after which the other end is gone. A cable that was cut for 15 s is heard from again within
30; links between roles give up a peer no earlier."""
MARK = b"\0distbelief agent\n"
"""First bytes of an agent: whatever a login shell prints before them is none of its messages."""

_PIECE = 1 << 16
_MOST = 1 << 22
"""Bytes that wait for either end, beyond which no more are read from the other."""
PARTING_SECONDS = 5.0
"""Limit for sending the last words."""

_encode = msgspec.msgpack.Encoder().encode
OF_PROCESS: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(ProcessMessage).decode
OF_HOST: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(HostMessage).decode
OF_PREDICTION: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(PredictionMessage).decode


class Channel:
    """One end of a channel: in both directions a message is its length in 4 bytes, and itself; never a pickle.

    Args:
        connection: to read from.
        writes: to write to, where that is another.
        decode: of what the other end may say.
    """

    def __init__(
        self,
        connection: Connection,
        writes: Connection | None = None,
        decode: Callable[[bytes], ChannelMessage] = OF_PROCESS,
    ) -> None:
        self.connection, self._writes, self._decode = connection, writes or connection, decode

    def say(self, message: ChannelMessage) -> None:
        """Send a message; to an end that is gone, nothing."""
        if isinstance(message, Failed) and len(message.text) > TEXT_LIMIT:
            message = Failed(message.kind, "..." + message.text[-TEXT_LIMIT:])
        try:
            self._writes.send_bytes(_encode(message))
        except OSError:
            return

    def hear(self) -> ChannelMessage | None:
        """The next message; None when the other end is gone, be it in the middle of one.

        Raises:
            RemoteProtocolError: what comes is no message.
        """
        try:
            return self._decode(self.connection.recv_bytes(MESSAGE_LIMIT))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the other end says what is no message: {error}") from error
        except (EOFError, OSError):
            return None

    def hear_all(self, take: Callable[[ChannelMessage], None]) -> bool:
        """Hand over every message that is here; False when the other end is gone.

        Raises:
            RemoteProtocolError: what is here is no message.
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
        """Say no more; the other end sees that."""
        self.connection.close()
        self._writes.close()


class Bridge:
    """Carries bytes both ways between a TLS connection and `line`, until either ends.

    Args:
        far: greeted already.
    """

    def __init__(self, far: TlsSocket) -> None:
        ours, near = socket.socketpair()
        self.line = Connection(ours.detach())
        self._far, self._near = far, near
        self._out, self._back = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._run, name="line to another host", daemon=True)
        far.setblocking(False)
        near.setblocking(False)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait so long for its end; whether it has."""
        self._thread.join(seconds)
        return self.over

    def cut(self) -> None:
        """End it, whatever is still to be sent."""
        with contextlib.suppress(OSError):  # below TLS, whose state the thread may be using
            socket.socket.shutdown(self._far, socket.SHUT_RDWR)

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
        """Carry what is there; False when an end has said its last."""
        poll = select.poll()
        for end, comes, goes in ((self._far, self._back, self._out), (self._near, self._out, self._back)):
            poll.register(end, (len(comes) <= _MOST) * select.POLLIN | bool(goes) * select.POLLOUT)
        poll.poll(0 if self._far.pending() and len(self._back) <= _MOST else None)
        near = self._take(self._near, self._out)
        far = self._take(self._far, self._back)
        self._give(self._near, self._back)
        self._give(self._far, self._out)
        if not far:  # its last words are handed on, as long as anybody hears them
            self._near.setblocking(True)
            self._near.sendall(self._back)
        return near and far

    def _part(self) -> None:
        """Send the last words, and read until the other end closes too: were this one closed with anything unread, TCP
        would reset the connection, and the last words could be lost on their way.
        """
        end = time.monotonic() + PARTING_SECONDS
        self._far.settimeout(PARTING_SECONDS)
        while self._out:
            del self._out[: self._far.send(bytes(self._out[:_PIECE]))]
        self._far.shutdown(socket.SHUT_WR)
        while time.monotonic() < end and self._far.recv(_PIECE):
            pass

    def _take(self, end: socket.socket, into: bytearray) -> bool:
        """Read what is there; False at the end, also where that is a reset: what came before it is handed on."""
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
        with contextlib.suppress(BlockingIOError, ConnectionError):  # what is still to be read is not lost by it
            while data:
                del data[: end.send(bytes(data[:_PIECE]))]
