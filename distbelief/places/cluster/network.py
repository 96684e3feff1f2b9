"""The addresses of a host, whether others are reached at theirs, and which one of its own a host is told by."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from distbelief.errors import UsageError
from distbelief.places.cluster.words import Way

TRY_SECONDS = 2.0
"""How long another host may take to answer."""
TRIPS, MEASURE_SECONDS, MOST_MEASURED = 21, 0.1, 1 << 28
"""Round trips whose median is the latency; how long the last, largest message takes at least, and its most bytes."""
_COUNT = struct.Struct("<Q")
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


def own_addresses() -> dict[str, str]:
    """The IPv4 addresses of this host, by interface; loopback last."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                told = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(told[20:24])
    return dict(sorted(found.items(), key=lambda one: ipaddress.ip_address(one[1]).is_loopback))


def network_identity() -> str:
    """Of this machine, as long as it runs, and of its network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def open_probe() -> socket.socket:
    """Listen at every address of this host, for others to try whether they reach it."""
    probe = socket.create_server(("", 0), backlog=64)
    probe.setblocking(False)
    return probe


def admit(probe: socket.socket) -> None:
    """Take whoever tries, and let go of him."""
    with contextlib.suppress(OSError):
        while True:
            probe.accept()[0].close()


def try_all(others: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Try to reach others, each at some addresses `host:port`, all at once; "" for one that answers, else why not."""
    found = {name: ["no answer"] * len(where) for name, where in others.items()}

    def attempt(name: str, number: int, where: str) -> None:
        host, _, port = where.rpartition(":")
        try:
            socket.create_connection((host, int(port)), TRY_SECONDS).close()
            found[name][number] = ""
        except OSError as error:
            found[name][number] = error.strerror or f"no answer within {TRY_SECONDS:.0f} s"

    threads = [
        threading.Thread(target=attempt, args=(name, number, where), daemon=True)
        for name, several in others.items()
        for number, where in enumerate(several)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TRY_SECONDS)
    return found


def answer_measures() -> int:
    """Answer whoever measures the way to this host, in a thread, as long as this process lives; at which port."""
    listener = socket.create_server(("", 0), backlog=64)

    def answer(connection: socket.socket) -> None:
        room = bytearray(1 << 20)
        with contextlib.suppress(OSError, struct.error), connection:
            while True:
                [left] = _COUNT.unpack(connection.recv(_COUNT.size, socket.MSG_WAITALL))
                while left:
                    left -= connection.recv_into(room, min(left, len(room))) or left
                connection.sendall(b"!")

    def serve() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def measure_all(others: Mapping[str, str]) -> dict[str, Way]:
    """The way to each of others, at `host:port`, one after the other; those that do not answer are left out."""
    found = {}
    for name, where in others.items():
        host, _, port = where.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), TRY_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = sorted(_trip(connection, 0) for _ in range(TRIPS))
            size, seconds = 1 << 16, 0.0
            while seconds < MEASURE_SECONDS and size < MOST_MEASURED:
                size *= 4
                seconds = _trip(connection, size)
            latency = trips[len(trips) // 2]
            found[name] = Way(latency, size / max(seconds - latency, 1e-9))
    return found


def _trip(connection: socket.socket, size: int) -> float:
    """Seconds until so many bytes have been sent and acknowledged."""
    began = time.monotonic()
    connection.sendall(_COUNT.pack(size) + bytes(size))
    if not connection.recv(1):
        raise ConnectionError("the other end is gone")
    return time.monotonic() - began


def choose(name: str, addresses: Sequence[str], told: Mapping[str, Sequence[str]]) -> str:
    """The address of a host that all who tried have reached.

    Args:
        name: of the host.
        addresses: of it, the best first.
        told: what each of the others says of each address, as `try_all` does.

    Raises:
        UsageError: there is none; the message has both ends' names, and what was tried.

    >>> choose("b", ["10.0.0.2", "192.168.0.2"], {"a": ["No route to host", ""], "c": ["", ""]})
    '192.168.0.2'
    >>> choose("b", ["10.0.0.2"], {"a": ["Connection refused"], "c": [""]})
    Traceback (most recent call last):
    distbelief.errors.UsageError: host a cannot reach host b: 10.0.0.2 (Connection refused); ...
    """
    for number, address in enumerate(addresses):
        if not any(said[number] for said in told.values()):
            return address
    other = next((one for one, said in told.items() if all(said)), next(iter(told), "any other"))
    tried = ", ".join(f"{one} ({why or 'answers'})" for one, why in zip(addresses, told.get(other, []), strict=False))
    raise UsageError(
        f"host {other} cannot reach host {name}: {tried or 'it has no address'}; open the ports between the hosts, "
        "mend the route, or name the interface that others reach with --interface"
    )


def order(addresses: Iterable[str], first: Iterable[str], same: bool) -> list[str]:
    """Which addresses of a host are tried: those by which it was reached already first; loopback only where all hosts
    are one machine.
    """
    several = list(dict.fromkeys([*first, *addresses]))
    loopback = [one for one in several if ipaddress.ip_address(one).is_loopback]
    return loopback[:1] if same and loopback else [one for one in several if one not in loopback]
