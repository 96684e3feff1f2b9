"""Carrier between hosts: TCP, with each payload raw after its message, straight between memory and socket."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import mmap
import socket
import struct
import termios
import time

import torch

from distbelief.core.messages import Bulk
from distbelief.errors import RemoteProtocolError, UsageError
from distbelief.transport.addresses import joined
from distbelief.transport.base import Arena
from distbelief.transport.link import CONNECT_SECONDS, STRANGERS_LIMIT, Link, closed_on_error
from distbelief.transport.sockets import SocketEndpoint

BEAT_SECONDS = 1.0
"""Seconds between two signs of life of an idle connection."""
LEAST_SECONDS = 30.0
"""Silence that any network may have: TCP retries ever more slowly, so a cut may appear twice as long as it was."""
FACTOR = 8.0
"""Factor over the longest silence that has ended, beyond which a silence is a death."""
SILENCE_SECONDS = 120.0
"""Longest silence of a peer's host, on any network, before the link is lost."""
BUFFER = 4 << 20
"""Bytes of a connection's kernel buffer, each way: the rate of a fast link times its round trip (1 Gbyte/s, 4 ms)."""
CONGESTION = b"cubic"
"""Congestion control of the kernel: on loopback bbr reaches half its speed."""
_INFO = struct.Struct("@52x2I")
"""Fields of the kernel's tcp_info: milliseconds since the last data and the last acknowledgement
(tcpi_last_{data,ack}_recv)."""
_SCHEME = "tcp:"


# The kernels of two hosts exchange a sign of life every `BEAT_SECONDS`, however busy the processes are: a long step is
# no silence. After a silence that ended, the next may last longer.
class Pulse:
    """Silences of the host at the other end of a link, and how long the next may last: at `most` so many seconds.

    >>> pulse = Pulse(most=120.0)
    >>> [pulse.lost(silence) for silence in (0.9, 29.0, 31.0)]
    [False, False, True]
    >>> pulse = Pulse(most=120.0)
    >>> [pulse.lost(silence) for silence in (9.0, 0.1, 31.0, 71.0, 73.0)], pulse.bound
    ([False, False, False, False, True], 72.0)
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._last = self._longest = 0.0

    @property
    def bound(self) -> float:
        """Limit in seconds of a silence."""
        return min(self._most, max(LEAST_SECONDS, FACTOR * self._longest))

    def lost(self, silence: float) -> bool:
        """Return whether a silence of `silence` seconds is a death; one shorter than the last measured is a new one."""
        if silence < self._last:
            self._longest = max(self._longest, self._last)
        self._last = silence
        return silence > self.bound


class TcpEndpoint(SocketEndpoint):
    """One role's end of the carrier between hosts. Addresses are `tcp:HOST:PORT`, or `tcp:[HOST]:PORT` for IPv6.

    Args:
        insecure: allow addresses beyond loopback, unencrypted and open to all who can reach them.
    """

    def __init__(self, role: str, job: str, incarnation: int = 0, *, insecure: bool = False) -> None:
        super().__init__(role, job, incarnation)
        self.insecure = insecure
        self._feels, self._felt = True, 0.0
        self._pulses: dict[int, tuple[Link, Pulse]] = {}

    def _attend(self, timeout: float | None) -> float | None:
        now = time.monotonic()
        if now >= self._felt + BEAT_SECONDS:
            self._felt = now
            # an idle peer and a dead network look alike to a socket: the kernels' signs of life tell them apart
            for link in list(self._links.values()):
                self._feel(link)
        wait = super()._attend(timeout)
        return BEAT_SECONDS if wait is None else min(wait, BEAT_SECONDS)

    def _feel(self, link: Link) -> None:
        known = self._pulses.get(link.fd)
        if known is None or known[0] is not link:
            known = self._pulses[link.fd] = link, Pulse(SILENCE_SECONDS)
        pulse, silence = known[1], silence_of(link.socket)
        if pulse.lost(silence):
            self._lose(
                link,
                f"nothing came from the host of {link.role} for {silence:.0f} s; here that is a death after "
                f"{pulse.bound:.0f} s",
            )

    def listen(self, address: str = "", advertise: str = "") -> str:
        """Accept links; return the address to advertise.

        `address` is where to listen: port 0 lets the kernel choose a port, and "" is loopback. Any other address needs
        `insecure`. `advertise` is the name or number by which others reach this host; "" for the host of `address`.
        """
        address = address or f"{_SCHEME}127.0.0.1:0"
        family, (host, port, *rest) = self._resolve(address)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._tune(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port, *rest))
            listener.listen(STRANGERS_LIMIT)
        except OSError as error:
            listener.close()
            remedy = f"choose another port than {port}, or port 0 for any that is free"
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = f"{host} is no address of this machine; write HOST or HOST:PORT with one that is"
            raise UsageError(f"cannot listen at {address}: {error}; {remedy}") from error
        self._listen_on(listener)
        return f"{_SCHEME}{joined(advertise or host, listener.getsockname()[1])}"

    def _resolve(self, address: str) -> tuple[socket.AddressFamily, tuple[str, int, *tuple[int, ...]]]:
        host, _, port = address.removeprefix(_SCHEME).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not address.startswith(_SCHEME) or not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"{address!r} is no address of this carrier; write it as tcp:HOST:PORT")
        try:
            family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"the host of {address!r} is unknown: {error}; give its number, or a name that this host can look up"
            ) from error
        self._check_network(address, str(where[0]))
        return family, (str(where[0]), *where[1:])

    def _check_network(self, address: str, host: str) -> None:
        """Refuse a network on which others could read and forge messages."""
        if not self.insecure and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise UsageError(
                f"{address!r} is not a loopback address, and plain TCP can be read and forged by others on the "
                "network: use TLS, or say --insecure if the network is yours alone"
            )

    def _tune(self, connection: socket.socket) -> None:
        """Set the options of a connection; those that a listener accepts inherit them."""
        with contextlib.suppress(OSError):  # a container may not be allowed to choose it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_SECONDS * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(BEAT_SECONDS))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(BEAT_SECONDS))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)

    def _dial(self, role: str, address: str) -> socket.socket:
        family, where = self._resolve(address)
        connection = socket.socket(family, socket.SOCK_STREAM)
        with closed_on_error(connection):
            self._tune(connection)
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(where)
        return connection

    def _admit(self, connection: socket.socket) -> socket.socket:
        return connection  # an accepted connection has the listener's options

    def _borrow(self, link: Link) -> None:
        """Reserve addresses for the peer's pushes; only pages that it fills take memory."""
        hello = link.hello
        try:
            link.lent = Arena(tuple(_reserve(hello.size) for _ in range(hello.gradients)), (), link.held)
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(
                f"no room for {hello.gradients} vectors of {hello.size} bytes, which {hello.role} lends: {error}"
            ) from error

    def _carry(self, link: Link, message: Bulk, payload: torch.Tensor) -> memoryview:
        return payload.numpy().data

    def _landing(self, payload: torch.Tensor) -> memoryview:
        return payload.numpy().data

    def _linger(self, link: Link, deadline: float) -> None:
        """Wait until the peer's host has acknowledged everything."""
        # closing a socket with unread bytes resets it, and the kernel drops unsent data
        with contextlib.suppress(OSError):  # the peer is gone already
            link.socket.shutdown(socket.SHUT_WR)
            left = array.array("i", [1])
            while time.monotonic() < deadline:
                fcntl.ioctl(link.fd, termios.TIOCOUTQ, left)
                if not left[0]:
                    break
                time.sleep(0.001)


def _reserve(size: int) -> torch.Tensor:
    """Return zeroed memory whose pages are allocated when they are written."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def silence_of(connection: socket.socket) -> float:
    """Return the seconds since anything, even an acknowledgement, came from the host at the other end."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    return float(min(_INFO.unpack(info))) / 1000
