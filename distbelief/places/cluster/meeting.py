"""Meeting of the processes that a launcher has started.

The first listens, and writes a ticket into a folder that all hosts share. The others read the ticket, and connect. One
process of each host becomes its agent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import stat
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

import msgspec

from distbelief.core import roles
from distbelief.errors import JobFailed, UsageError
from distbelief.places import signals
from distbelief.places.channel import MARK, OF_HOST, Bridge, Channel
from distbelief.places.cluster import network
from distbelief.places.cluster.engines import StartedAgent, agent_command, spawn
from distbelief.places.cluster.hosts import Host
from distbelief.places.cluster.launched import Launched, hostname
from distbelief.places.cluster.ray_cluster import RayInvitation
from distbelief.places.join.ticket import CROWD, GUEST, LIMIT, VERSION, Ticket, TicketServer, reach
from distbelief.places.messages import Appoint, AttendMeeting, ChannelMessage, Dismiss
from distbelief.record import limits
from distbelief.record.folder import OWNER_ALONE, written_whole
from distbelief.transport.addresses import joined, listen_anywhere, own_addresses
from distbelief.transport.secure import TlsSocket

MEET_SECONDS = 45.0
"""Limit in seconds for all processes to come together."""
GREET_SECONDS = 5.0
"""Limit in seconds for a connection to end."""
PAUSE = 0.1


class Invitation(Protocol):
    """Invitation that hands the ticket to the other processes of a job."""

    ranks: range
    """Ranks of the other processes."""
    here: Launched | None
    """The first process, if it offers slots itself."""

    def send(self, ticket: Ticket) -> None:
        """Hand the ticket out.

        Raises:
            UsageError: it cannot be handed out.
        """
        ...

    def check(self) -> None:
        """Raise a JobFailed if some of the processes will never come."""
        ...

    def withdraw(self) -> None:
        """Withdraw the ticket: all processes have come, or the wait is over."""
        ...

    def close(self) -> None:
        """Release the resources: the job is over."""
        ...

    def late(self, missing: list[int]) -> str:
        """Return the message that some ranks have not come, with the remedy."""
        ...


class TicketFile:
    """Invitation for the processes of a launcher: a ticket file in a folder that all hosts share.

    Args:
        start: the first process.
        folder: the folder; "" for the working directory.
    """

    def __init__(self, start: Launched, folder: str) -> None:
        self.here: Launched | None = start
        self.ranks = range(1, start.size)
        self.path, self._start = ticket_path(start, folder), start
        self._sent: bytes | None = None

    def send(self, ticket: Ticket) -> None:
        """Write the ticket, readable only by its owner."""
        self._sent = ticket.text
        _write(self.path, self._sent)

    def check(self) -> None:
        """Do nothing: processes that have not come may still come."""

    def withdraw(self) -> None:
        """Remove the ticket, unless a restart by the launcher has already replaced it."""
        with contextlib.suppress(OSError):
            if self.path.read_bytes() == self._sent:
                self.path.unlink()

    def close(self) -> None:
        """Do nothing."""

    def late(self, missing: list[int]) -> str:
        """Return the message that some of the launcher's processes have not come."""
        more = ", ..." if len(missing) > 8 else ""
        return (
            f"{len(missing)} of the {self._start.size} processes that {self._start.launcher} has started have not "
            f"come, by rank {', '.join(map(str, missing[:8]))}{more}: is {self.path.parent} a folder that all hosts "
            "share (name one with --tickets), and can they reach this host?"
        )


def ticket_path(start: Launched, folder: str) -> Path:
    """Return the path of a start's ticket."""
    return Path(folder or ".").absolute() / f".distbelief-{start.launcher}-{start.name}.ticket"


def _write(path: Path, text: bytes) -> None:
    """Write a ticket that only its owner can read.

    Raises:
        UsageError: no such file can be written to the folder.
    """
    try:
        with written_whole(path, OWNER_ALONE) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UsageError(
                    f"{path.parent} keeps no file for its owner alone, and a ticket must be one: name another folder "
                    "that all hosts share, with --tickets"
                )
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"no ticket can be written to {path.parent}: {error.strerror}; name a folder that all hosts share, with "
            "--tickets"
        ) from error


def read_ticket_file(path: Path) -> Ticket | None:
    """Return the ticket in a file; None if there is none (yet).

    Raises:
        UsageError: others could have read or written it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UsageError(
                    f"{path} is of user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}; a ticket is of user "
                    f"{os.getuid()} alone (600): remove it, and name another shared folder with --tickets"
                )
            return msgspec.json.decode(file.read(LIMIT), type=Ticket)
    except (OSError, msgspec.MsgspecError):
        return None


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end when the other host has not answered for as long as a line may be silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class Attendant:
    """Another process of the launcher, as the first one sees it; its methods are those of a local process."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge, self.line = bridge, Channel(bridge.line, decode=OF_HOST)
        self.attend: AttendMeeting | None = None
        self.printed, self._prints = os.pipe()
        """File descriptor for its output, which stays empty: its output goes to the launcher."""

    def take(self, word: ChannelMessage) -> None:
        """Handle a message from the process, before it is an agent."""
        if isinstance(word, AttendMeeting):
            self.attend = word

    def poll(self) -> int | None:
        """Return 1 when it is gone, else None."""
        return 1 if self.bridge.over else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is gone, and return 1."""
        self.bridge.wait(0.0 if timeout is None else timeout)
        return 1

    def kill(self) -> None:
        """Cut the connection; the process ends when its line has ended."""
        self.bridge.cut()
        with contextlib.suppress(OSError):
            os.close(self._prints)


class Meeting:
    """Meeting held by the first process, which admits the others until all are here, and chooses the hosts' agents.

    Args:
        invitation: hands the ticket to the others.
        interface: the network interface by whose address they reach this host; "" for any.

    Raises:
        UsageError: no ticket can be handed out.
        JobFailed: not all have come in time, or one has another version.
    """

    def __init__(self, invitation: Invitation, interface: str) -> None:
        from distbelief.places.join.authority import Authority  # imports cryptography

        self._invitation = invitation
        job = f"start {secrets.token_hex(8)}"
        authority, listener = Authority(job), listen_anywhere(2 * CROWD)
        by_interface = own_addresses()
        addresses = by_interface.get(interface) or [address for several in by_interface.values() for address in several]
        port = listener.getsockname()[1]
        self._let_in: list[Attendant] = []
        self.attendants: dict[int, Attendant] = {}
        self.hosts: tuple[Host, ...] = ()
        self.restarts = invitation.here.restarts if invitation.here else 0
        """Largest number of restarts that the launcher counts on any host."""
        self.is_over = False
        self._agents: dict[str, tuple[Attendant | None, list[int]]] = {}
        """Agent of each host, with the host's processors; None for an agent that this process starts."""
        atexit.register(invitation.withdraw)
        crowd = CROWD + len(invitation.ranks)
        server = TicketServer(listener, authority.issue(roles.SUPERVISOR), self._greet, keeps=True, crowd=crowd)
        try:
            where = [joined(address, port) for address in addresses]
            invitation.send(Ticket(job, where, "", authority.issue(GUEST)))
            self._gather()
        finally:
            server.close()
            invitation.withdraw()
            atexit.unregister(invitation.withdraw)
        self._name_hosts()

    def _greet(self, far: socket.socket) -> None:
        assert isinstance(far, TlsSocket)
        keep_alive(far)
        self._let_in.append(Attendant(Bridge(far)))

    def _gather(self) -> None:
        end = time.monotonic() + MEET_SECONDS
        while len(self.attendants) < len(self._invitation.ranks):
            self._invitation.check()
            wait([attendant.line.connection for attendant in self._let_in if not attendant.bridge.over], PAUSE)
            for attendant in list(self._let_in):
                if attendant.line.hear_all(attendant.take) and attendant.attend:
                    self._let_in.remove(attendant)
                    self._admit(attendant, attendant.attend)
            if time.monotonic() > end:
                missing = [rank for rank in self._invitation.ranks if rank not in self.attendants]
                raise JobFailed(f"within {MEET_SECONDS:.0f} s, {self._invitation.late(missing)}")

    def _admit(self, attendant: Attendant, attend: AttendMeeting) -> None:
        if attend.version != VERSION:
            raise JobFailed(
                f"host {attend.hostname} runs distbelief {attend.version}, this is {VERSION}: install the same on all"
            )
        self.attendants[attend.rank] = attendant
        self.restarts = max(self.restarts, attend.restarts)

    def _name_hosts(self) -> None:
        """Name the hosts in the order of their ranks, each with the processors of all its processes."""
        by_network: dict[str, list[tuple[AttendMeeting, Attendant | None]]] = {}
        if self._invitation.here:
            mine = _attend(self._invitation.here)
            by_network[mine.network] = [(mine, None)]
        for _, attendant in sorted(self.attendants.items()):
            assert attendant.attend
            by_network.setdefault(attendant.attend.network, []).append((attendant.attend, attendant))
        hosts = []
        for several in by_network.values():
            several.sort(key=lambda each: (each[1] is not None, each[0].local_rank))
            first, agent = several[0]
            name, number = first.hostname, 1
            while name in self._agents:
                number += 1
                name = f"{first.hostname}.{number}"
            processors = sorted({processor for attend, _ in several for processor in attend.processors})
            self._agents[name] = agent, processors
            allotted = max(attend.cores for attend, _ in several) or len(processors)
            hosts.append(Host(name, min(allotted, first.quota)))
        self.hosts = tuple(hosts)

    def start(self, host: str) -> StartedAgent:
        """Begin to start the agent of a host, as an engine does."""
        agent, processors = self._agents[host]
        if agent is None:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, processors)  # a launcher may have bound this process to one of them
            try:
                return spawn(["sh", "-c", agent_command()])
            finally:
                os.sched_setaffinity(0, before)
        agent.line.say(Appoint(processors))
        return StartedAgent(agent, agent.bridge.line, agent.printed, stays=True)

    def dismiss(self, status: int) -> None:
        """Let all other processes end with a status; agents end the processes that they have started first."""
        self.is_over = True
        for attendant in self.attendants.values():
            attendant.line.say(Dismiss(status))
            attendant.line.close()
        end = time.monotonic() + GREET_SECONDS
        for attendant in self.attendants.values():
            attendant.bridge.wait(max(0.0, end - time.monotonic()))
        self.attendants.clear()
        self._invitation.close()


_HELD: dict[str, Meeting] = {}
"""Meetings of this process: the launcher's, and those of each Ray cluster."""


def meet(start: Launched, folder: str, interface: str) -> Meeting:
    """Return the meeting of the first of a launcher's processes; it is held once."""
    if start.name not in _HELD:
        _HELD[start.name] = Meeting(TicketFile(start, folder), interface)
    if _HELD[start.name].is_over:
        raise UsageError(
            f"{start.launcher} has started this command {start.size} times, for one job, and that is over: start it "
            "again for the next one"
        )
    return _HELD[start.name]


def meet_by_ray(address: str, interface: str) -> Meeting:
    """Return the meeting of the nodes of a Ray cluster; it is held once for each job."""
    key = f"ray:{address}"
    if key not in _HELD or _HELD[key].is_over:
        _HELD[key] = Meeting(RayInvitation(address), interface)
    return _HELD[key]


def attend(start: Launched, folder: str) -> int:
    """Attend the meeting as another process until the job is over; run the agent of this host if asked to.

    Returns:
        The status of the job; 1 where the first process is gone.

    Raises:
        JobFailed: no ticket is found, or its writer does not answer.
    """
    return _stay(start, _find(start, ticket_path(start, folder)))


def _stay(start: Launched, far: socket.socket) -> int:
    """Serve the first process until it dismisses this one; return the status of the job."""
    assert isinstance(far, TlsSocket)
    keep_alive(far)
    bridge = Bridge(far)
    line = Channel(bridge.line, decode=OF_HOST)
    line.say(_attend(start))
    try:
        with signals.waitable():  # a launcher ends all processes: the first handles it
            match line.hear():
                case Appoint() as appointed:
                    from distbelief.places.cluster.agent import serve

                    os.sched_setaffinity(0, appointed.processors)
                    os.write(bridge.line.fileno(), MARK)
                    return serve(line)
                case Dismiss() as dismissed:
                    return dismissed.status
            return 1
    finally:
        line.close()
        bridge.wait(GREET_SECONDS)


def main() -> None:
    """Attend the meeting of the ticket on standard input."""
    start, ticket = msgspec.json.decode(sys.stdin.buffer.readline(LIMIT), type=tuple[Launched, Ticket])
    try:
        far = reach(ticket)
    except OSError as error:
        raise SystemExit(f"nobody answers who made the ticket: {error}") from None
    raise SystemExit(_stay(start, far))


def _find(start: Launched, path: Path) -> socket.socket:
    """Return a connection to the first process, as soon as its ticket is there."""
    end = time.monotonic() + MEET_SECONDS
    why = f"there is no {path}: is its folder one that all hosts share? Name one with --tickets"
    while time.monotonic() < end:
        if (ticket := read_ticket_file(path)) is not None:
            try:
                return reach(ticket)
            except OSError as error:
                why = f"nobody answers who wrote {path}: {error}; open the ports between the hosts, or mend the route"
        time.sleep(PAUSE)
    raise JobFailed(
        f"process {start.rank} of the {start.size} that {start.launcher} has started does not find the first one: {why}"
    )


def _attend(start: Launched) -> AttendMeeting:
    """Return the introduction of this process."""
    allowed = sorted(os.sched_getaffinity(0))
    return AttendMeeting(
        start.rank,
        start.local_rank,
        network.network_identity(),
        hostname(),
        allowed,
        start.cores,
        limits.quota(),
        VERSION,
        start.restarts,
    )


if __name__ == "__main__":
    main()
