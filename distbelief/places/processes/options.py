"""Options of a machine's processes: transport, addresses, update path, logs and compute times; and address checks."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from distbelief.core import roles
from distbelief.core.values import Checked
from distbelief.errors import UsageError
from distbelief.places.compute_model import ComputeModel
from distbelief.transport.addresses import joined, own_addresses

ANYWHERE = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}
"""Hosts to bind that stand for all addresses, and so cannot be advertised; each with a distant address of its family.
"""
PORTS = 65535
REACH_SECONDS = 2.0
"""Limit for this machine to reach itself."""
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_BIND = re.compile(
    r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]+))?|(?P<bare>[^:\[\]]*:[^:\[\]]*:[^\[\]]*)"
)


@dataclass(frozen=True)
class LocalOptions(Checked):
    """Options of processes of this machine, and the values that follow from them."""

    transport: str = "shared"
    """Carrier of bytes: shared (memory) or tcp."""
    bind: str = "127.0.0.1"
    """With tcp, HOST or HOST:PORT: the coordinator listens at that port and the shards at the next ones; standbys, and
    all roles if no PORT is named, listen at free ports."""
    advertise: str = ""
    """With tcp, the host at which other machines reach these roles; if empty, that of --bind, or this machine's own
    address if --bind is 0.0.0.0.
    """
    insecure: bool = False
    """Plain TCP on any network, which anybody there can read and forge; otherwise links beyond loopback are encrypted,
    and closed to others.
    """
    tls: bool = False
    """With tcp, encrypt links on loopback too."""
    listen: str = ""
    """HOST or HOST:PORT at which other machines may join: writes a ticket into the run folder, for `distbelief join`.
    The coordinator and the shards listen at the next ports. It implies --transport tcp."""
    path: str = "auto"
    """Path of updates: served (made by the shards' processes), direct (by each replica, in memory that it shares with
    the shards, under their locks), or auto (direct where the job allows it).
    """
    logs: bool = False
    """Write the output of each role to its own file in the run folder, as logs/replica-0.log, and show none of it."""
    compute: ComputeModel | None = None
    """Compute model whose step times are matched by sleeping; it scales its own step time, or the real one if
    longer."""

    @property
    def carrier(self) -> str:
        """Return the transport; `listen` implies tcp."""
        return "tcp" if self.listen else self.transport

    @property
    def bound(self) -> str:
        """Return the address at which the roles listen: `bind`, or the port after the join server of `listen`."""
        if not self.listen:
            return self.bind
        host, port = host_and_port(self.listen, "--listen")
        return joined(host, port + 1 if port else 0)

    @property
    def advertised(self) -> str:
        """Return the host that other machines connect to."""
        return told_host(self.bound, self.advertise)

    @property
    def encrypted(self) -> bool:
        """Return whether links use TLS: with `tls`, and on any network but loopback; never with `insecure`."""
        if self.carrier != "tcp" or self.insecure:
            return False
        return self.tls or not (is_loopback(host_and_port(self.bound)[0]) and is_loopback(self.advertised))


def listen_at(bind: str, role: str, asked: str = "") -> str:
    """Return the address at which a role listens, by `Local.bind`.

    The coordinator has the port named there, the shards have the next ports, and a standby has any free one.

    Raises:
        UsageError: `bind` is no HOST or HOST:PORT, or the role's port would be too high.

    >>> [listen_at("10.0.0.1:7000", role) for role in ("coordinator", "shard 2", "standby 2")], listen_at("::1",
    ...     "shard 2")
    (['tcp:10.0.0.1:7000', 'tcp:10.0.0.1:7003', 'tcp:10.0.0.1:0'], 'tcp:[::1]:0')
    """
    host, first = host_and_port(bind)
    # a standby that becomes its shard keeps its port, while a new standby of the same name is started
    port = first + 1 + roles.index_of(role) if first and roles.kind(role) is not roles.Kind.STANDBY else 0
    if port > PORTS:
        raise UsageError(
            f"{asked or f'--bind {bind}'}: {role} would listen at port {port}, but the highest is {PORTS}; choose a "
            "lower one"
        )
    return f"tcp:{joined(host, port)}"


def check_network(bound: str, told: str) -> None:
    """Refuse a machine that has no route to itself: otherwise each of its roles would fail, again and again.

    An address that is slow, or forwarded for the ports of a job only, is not refused.
    """
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((bound, 0))
        except OSError:
            return  # the role that listens there will report the error, with the remedy
        listener.listen(1)
        try:
            socket.create_connection((told, listener.getsockname()[1]), REACH_SECONDS).close()
        except OSError as error:
            if error.errno not in UNREACHABLE:
                return
            remedy = (
                "bring up its loopback (ip link set lo up)" if is_loopback(told) else "name another with --advertise"
            )
            raise UsageError(
                f"--transport tcp: this machine cannot reach itself at {told}: {error.strerror}; {remedy}, or use "
                "--transport shared, which needs no network"
            ) from error


def told_host(bind: str, advertise: str) -> str:
    """Return the host that other machines connect to: `advertise`, or else the host of `bind`.

    If `bind` stands for all addresses, the host is the one with a route to the world, or the only one.

    Raises:
        UsageError: this machine has several addresses, and none with a route to the world.

    >>> told_host("10.0.0.1:7000", ""), told_host("0.0.0.0", "node7")
    ('10.0.0.1', 'node7')
    """
    host, _ = host_and_port(bind)
    if advertise or host not in ANYWHERE:
        return advertise or host
    family, far = ANYWHERE[host]
    try:
        return host_towards(far, family)
    except OSError:  # there is no route out of its own networks
        own = {
            one: name for name, several in own_addresses().items() for one in several if (":" in one) == (host == "::")
        }
    beyond = [one for one in own if not is_loopback(one)] or [*own]
    if len(beyond) == 1:
        return beyond[0]
    raise UsageError(
        f"{host}: at which address do others reach this machine? It has "
        f"{', '.join(f'{one} ({own[one]})' for one in beyond) or 'none of that version'}: name one with --advertise"
    )


def host_towards(other: str, family: int = socket.AF_UNSPEC) -> str:
    """Return the address of this machine from which it reaches another.

    Raises:
        OSError: there is no route to it.

    >>> host_towards("127.0.0.1")
    '127.0.0.1'
    """
    found, *_, where = socket.getaddrinfo(other, 9, family, socket.SOCK_DGRAM)[0]
    with socket.socket(found, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing: the kernel only chooses its route
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are this machine's loopback; False if the host is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)


def port_or_address(text: str) -> tuple[str, int]:
    """Return the host and port of a server that a person names: PORT of loopback, or HOST:PORT; port 0 is any.

    Raises:
        UsageError: it is neither.

    >>> port_or_address("9400"), port_or_address("10.0.0.1:9400")
    (('127.0.0.1', 9400), ('10.0.0.1', 9400))
    """
    host, port = host_and_port(f"127.0.0.1:{text}" if text.isdecimal() else text, "PORT or HOST:PORT")
    if port > PORTS:
        raise UsageError(f"port {port} is too high; choose one up to {PORTS}")
    return host, port


def host_and_port(bind: str, where: str = "--bind") -> tuple[str, int]:
    """Split HOST or HOST:PORT into host and port; the port is 0 if none is named.

    Raises:
        UsageError: `bind` is neither; the message names the option `where`.

    >>> host_and_port("10.0.0.1:7000"), host_and_port("[::1]:7000"), host_and_port("::1")
    (('10.0.0.1', 7000), ('::1', 7000), ('::1', 0))
    """
    if (found := _BIND.fullmatch(bind)) and not bind.isdecimal():  # a bare number is a port
        return found["six"] or found["host"] or found["bare"], int(found["port"] or 0)
    raise UsageError(
        f"{where} {bind!r}: write HOST or HOST:PORT, such as 10.0.0.1:7000, or [::1]:7000 for an IPv6 number"
    )
