"""A line by TLS: what goes between a connection of this process and one to another host, in a thread of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from multiprocessing.connection import Connection

from distbelief.transport.secure import RECORD, TlsSocket

_PIECE = 1 << 16
_MOST = 1 << 22
"""Bytes that wait for either end, beyond which no more are read from the other."""
PARTING_SECONDS = 5.0
"""Limit for sending the last words."""


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
