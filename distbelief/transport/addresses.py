"""Addresses of this host and listeners at them, and sockets of multiprocessing without a name on disk."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import multiprocessing
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path

_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_SIX = Path("/proc/net/if_inet6")
_LINK = "20"
"""Scope of link-local IPv6 addresses, which other hosts cannot use without naming an interface of their own."""


def own_addresses() -> dict[str, list[str]]:
    """Return the addresses of this host by interface, IPv4 first; loopback comes last."""
    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                addresses[name] = [socket.inet_ntoa(answer[20:24])]
    for line in _SIX.read_text().splitlines() if _SIX.exists() else ():
        digits, _, _, scope, _, name = line.split()
        if scope != _LINK:
            addresses.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return dict(sorted(addresses.items(), key=lambda interface: ipaddress.ip_address(interface[1][0]).is_loopback))


def interface_of(host: str) -> str:
    """Return this machine's network interface that has an address of a host; "" if none has.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    try:
        of_host = {str(where[0]) for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return ""
    return next((name for name, several in own_addresses().items() if of_host.intersection(several)), "")


def listen_anywhere(backlog: int) -> socket.socket:
    """Listen at a free port of every address of this host, IPv4 and IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=backlog)


def joined(host: str, port: object) -> str:
    """Write a host and a port as one address.

    >>> joined("10.0.0.1", 7000), joined("fd77::1", 7000)
    ('10.0.0.1:7000', '[fd77::1]:7000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cut(where: str) -> tuple[str, int]:
    """Return the host and the port of an address that `joined` wrote.

    >>> cut("[fd77::1]:7000")
    ('fd77::1', 7000)
    """
    host, _, port = where.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextlib.contextmanager
def socket_folder() -> Iterator[str]:
    """Have multiprocessing make its sockets in a temporary folder; yield a short name of that folder.

    Only this process can use the name.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # its stubs lack it
    with tempfile.TemporaryDirectory(prefix="distbelief-", ignore_cleanup_errors=True) as folder:
        place = os.open(folder, os.O_PATH)  # TMPDIR may be long, and the name of a socket may have only 107 characters
        before, config["tempdir"] = config.get("tempdir"), f"/proc/self/fd/{place}"
        try:
            yield config["tempdir"]
        finally:
            config["tempdir"] = before
            os.close(place)


def nameless(address: str, process: int | str = "self") -> str:
    """Return another address of a socket, which lasts as long as this process.

    `process` is self for use by this process, or its id for use by others.
    """
    return f"/proc/{process}/fd/{os.open(address, os.O_PATH)}"


def share_descriptors() -> None:
    """Serve descriptors (of minibatches' tensors) that this process and its forks send, at a socket without a file."""
    resource_sharer._resource_sharer._start = _listen  # type: ignore[attr-defined]  # its stubs lack it


def _listen() -> None:
    sharer = resource_sharer._resource_sharer  # type: ignore[attr-defined]  # as above
    with socket_folder():
        # at exit Python would remove the socket's file, whose name is gone with the folder
        type(sharer)._start(sharer)
        sharer._listener._listener._unlink.cancel()
        sharer._address = nameless(sharer._address, os.getpid())
