"""Connections between hosts: tests whether hosts reach each other, measurements, and the choice of addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from distbelief.errors import UsageError
from distbelief.places.channel import cut_off
from distbelief.places.messages import Way
from distbelief.transport.addresses import cut, listen_anywhere
from distbelief.transport.secure import MUTE

TRY_SECONDS = 2.0
"""Limit in seconds for another host's answer."""
HERE = "this host"
WHOLE, EXCHANGE_SECONDS = 1 << 15, 5.0
"""Bytes that are sent each way to test a connection, and the limit in seconds for them."""
MOST_VISITORS, VISIT_SECONDS = 256, 30.0
"""Most hosts that may try this one at once, and the longest silence of each in seconds."""
TRIPS, MEASURE_SECONDS, MOST_MEASURED = 21, 0.1, 1 << 28
"""Round trips for the median latency; least duration of the largest message in seconds; most bytes of a message."""
_AMOUNTS = struct.Struct("<QQ")
"""Number of bytes that follow, and number of bytes to return."""


def network_identity() -> str:
    """Return a name of this machine and its network, which is the same until the machine restarts."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


class WayServer:
    """Server for hosts that test and measure the connection to this one.

    It receives as many bytes as they announce, and returns as many as they request. It uses threads of its own until it
    is closed.
    """

    def __init__(self) -> None:
        self._listener = listen_anywhere(MOST_VISITORS)
        self.port = int(self._listener.getsockname()[1])
        self._visitors: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        cut_off(self._listener)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                visitor, _ = self._listener.accept()
                if len(self._visitors) < MOST_VISITORS:
                    self._visitors.add(visitor)
                    threading.Thread(target=self._answer, args=(visitor,), daemon=True).start()
                else:
                    visitor.close()

    def _answer(self, visitor: socket.socket) -> None:
        room = bytearray(1 << 20)
        with contextlib.suppress(OSError, struct.error), visitor:
            visitor.settimeout(VISIT_SECONDS)
            while True:
                left, back = _AMOUNTS.unpack(visitor.recv(_AMOUNTS.size, socket.MSG_WAITALL))
                while left:
                    left -= visitor.recv_into(room, min(left, len(room))) or left
                visitor.sendall(bytes(min(back, WHOLE)))
        self._visitors.discard(visitor)


def try_all(others: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Try to reach the `WayServer` of other hosts, each at some addresses `host:port`, all at once.

    Return "" for each address that answers, else the reason why it does not.
    """
    tried = {name: ["no answer"] * len(where) for name, where in others.items()}

    def note(name: str, number: int, where: str) -> None:
        tried[name][number] = attempt(where, WHOLE)

    threads = [
        threading.Thread(target=note, args=(name, number, where), daemon=True)
        for name, several in others.items()
        for number, where in enumerate(several)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * (TRY_SECONDS + EXCHANGE_SECONDS))
    return tried


def attempt(where: str, size: int = 0) -> str:
    """Try to reach a port; return "" if it answers, else the reason why it does not.

    `where` is the address, `host:port`. If a `WayServer` listens there, `size` is the number of bytes to send each way.
    """
    try:
        connection = socket.create_connection(cut(where), TRY_SECONDS)
    except OSError as error:
        return error.strerror or f"no answer within {TRY_SECONDS:.0f} s"
    try:
        with connection:
            connection.settimeout(EXCHANGE_SECONDS)
            if size:
                _trip(connection, size, size)
        return ""
    except TimeoutError:
        return MUTE
    except OSError as error:
        return f"its port answers, but no bytes come: {error.strerror or error}"


def measure_all(others: Mapping[str, str]) -> dict[str, Way]:
    """Measure the connection to each other host, one after the other; hosts that do not answer are left out."""
    measured = {}
    for name, where in others.items():
        with contextlib.suppress(OSError), socket.create_connection(cut(where), TRY_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = sorted(_trip(connection, 0) for _ in range(TRIPS))
            size, seconds = 1 << 16, 0.0
            while seconds < MEASURE_SECONDS and size < MOST_MEASURED:
                size *= 4
                seconds = _trip(connection, size)
            latency = trips[len(trips) // 2]
            measured[name] = Way(latency, size / max(seconds - latency, 1e-9))
    return measured


def _trip(connection: socket.socket, size: int, back: int = 1) -> float:
    """Send so many bytes, receive others, and return the seconds that it took."""
    began = time.monotonic()
    connection.sendall(_AMOUNTS.pack(size, back) + bytes(size))
    while back:
        if not (count := len(connection.recv(back))):
            raise ConnectionError("the other end is gone")
        back -= count
    return time.monotonic() - began


def choose(name: str, addresses: Sequence[str], answers: Mapping[str, Sequence[str]]) -> str:
    """Return the first address of a host that all others have reached.

    `addresses` are those of the host, the best first. `answers` has the result of each other host for each address, as
    from `try_all`.

    Raises:
        UsageError: there is none; the message names both hosts, and the addresses that were tried.

    >>> choose("b", ["10.0.0.2", "192.168.0.2"], {"a": ["No route to host", ""], "c": ["", ""]})
    '192.168.0.2'
    >>> choose("b", ["10.0.0.2"], {"a": ["Connection refused"], "c": [""]})
    Traceback (most recent call last):
    distbelief.errors.UsageError: host a cannot reach host b: 10.0.0.2 (Connection refused); ...
    """
    for number, address in enumerate(addresses):
        if not any(answer[number] for answer in answers.values()):
            return address
    other = next((host for host, answer in answers.items() if all(answer)), next(iter(answers), "any other"))
    tried = ", ".join(f"{at} ({why or 'answers'})" for at, why in zip(addresses, answers.get(other, []), strict=False))
    who, whom = (host if host == HERE else f"host {host}" for host in (other, name))
    raise UsageError(
        f"{who} cannot reach {whom}: {tried or 'it has no address'}; open the ports between the hosts, "
        "mend the route, or name the interface that others reach with --interface"
    )


def order(addresses: Iterable[str], first: Iterable[str], same: bool) -> list[str]:
    """Order addresses to try: those that worked already come first; loopback only if all hosts are one machine."""
    several = [address for address in dict.fromkeys([*first, *addresses]) if "%" not in address]  # link-local
    loopback = [address for address in several if ipaddress.ip_address(address).is_loopback]
    return loopback[:1] if same and loopback else [address for address in several if address not in loopback]
