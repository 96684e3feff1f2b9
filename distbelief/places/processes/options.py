"""Options of a machine's processes: how they reach each other and whoever joins from others, and how slow they are
made.
"""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.core.values import Checked
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.addresses import host_and_port, is_loopback, told_host
from distbelief.transport.addresses import joined


@dataclass(frozen=True)
class LocalOptions(Checked):
    """Options of processes of this machine, and what follows from them."""

    transport: str = "shared"
    """Carrier of bytes: shared (memory) or tcp."""
    bind: str = "127.0.0.1"
    """With tcp, HOST or HOST:PORT: the coordinator listens at that port and the shards at the next ones; standbys, and
    all where there is no PORT, at any that are free."""
    advertise: str = ""
    """With tcp, the host that others are told to reach them at; else that of --bind, or this machine's own address
    where that is 0.0.0.0.
    """
    insecure: bool = False
    """Plain TCP on any network, to be read and forged by whoever is there; else links beyond loopback are encrypted,
    and closed to others.
    """
    tls: bool = False
    """With tcp, encrypt links on loopback too."""
    listen: str = ""
    """HOST or HOST:PORT where other machines may join: writes a ticket into the run folder, for `distbelief join`. The
    coordinator and the shards listen at the ports after it. It implies --transport tcp."""
    path: str = "auto"
    """Path of updates: served (made by the shards' processes), direct (by each replica, in memory that it shares with
    the shards, under their locks), or auto (direct where the job allows it).
    """
    logs: bool = False
    """Keep what each role prints in a file of its own in the run folder, as logs/replica-0.log, and show none of it."""
    compute: ComputeModel | None = None
    """Sleep after each step, so that replicas are as slow as this has them; a step that is slower is its own least."""

    @property
    def carrier(self) -> str:
        """The transport, with what --listen implies."""
        return "tcp" if self.listen else self.transport

    @property
    def told_carrier(self) -> str:
        """Return how bytes travel, as the result says it: shared, tcp or tls."""
        return "tls" if self.encrypted else self.carrier

    @property
    def bound(self) -> str:
        """Return where the roles listen: as `bind`, or after the join server of --listen."""
        if not self.listen:
            return self.bind
        host, port = host_and_port(self.listen, "--listen")
        return joined(host, port + 1 if port else 0)

    @property
    def advertised(self) -> str:
        """The host that others are told."""
        return told_host(self.bound, self.advertise)

    @property
    def encrypted(self) -> bool:
        """Return whether the links are TLS: where that was asked for, and on any network but loopback, unless
        `insecure`.
        """
        if self.carrier != "tcp" or self.insecure:
            return False
        return self.tls or not (is_loopback(host_and_port(self.bound)[0]) and is_loopback(self.advertised))
