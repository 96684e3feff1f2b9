"""Meeting of the processes that a launcher has started: the first listens and writes a ticket into a folder that all
hosts share; the others read it, and one of each host is appointed its agent.
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
"""Limit for all of the processes to come together."""
GREET_SECONDS = 5.0
"""Limit for a handshake."""
PAUSE = 0.1


class Invitation(Protocol):
    """Invitation by which the other processes of a job get their ticket."""

    ranks: range
    """Theirs."""
    here: Launched | None
    """The first one, where it offers slots itself."""

    def send(self, ticket: Ticket) -> None:
        """Hand it out.

        Raises:
            UsageError: it cannot be.
        """
        ...

    def check(self) -> None:
        """Raise, where some of them will never come, a JobFailed."""
        ...

    def withdraw(self) -> None:
        """All have come, or nobody is waited for any more."""
        ...

    def close(self) -> None:
        """The job is over."""
        ...

    def late(self, missing: list[int]) -> str:
        """Return what to say, with what to do, when some ranks have not come."""
        ...


class TicketFile:
    """A ticket for processes that a launcher has started: a file in a folder that all hosts share.

    Args:
        start: the first of them.
        folder: "" for the working directory.
    """

    def __init__(self, start: Launched, folder: str) -> None:
        self.here: Launched | None = start
        self.ranks = range(1, start.size)
        self.path, self._start = ticket_path(start, folder), start
        self._sent: bytes | None = None

    def send(self, ticket: Ticket) -> None:
        """Write it for its owner only."""
        self._sent = ticket.text
        _write(self.path, self._sent)

    def check(self) -> None:
        """Whoever has not come may still come."""

    def withdraw(self) -> None:
        """Remove it, unless by now the launcher has started all again, and it is another's."""
        with contextlib.suppress(OSError):
            if self.path.read_bytes() == self._sent:
                self.path.unlink()

    def close(self) -> None:
        """Nothing is left to do."""

    def late(self, missing: list[int]) -> str:
        """Return whom the launcher has started, and who has not come."""
        more = ", ..." if len(missing) > 8 else ""
        return (
            f"{len(missing)} of the {self._start.size} processes that {self._start.launcher} has started have not "
            f"come, by rank {', '.join(map(str, missing[:8]))}{more}: is {self.path.parent} a folder that all hosts "
            "share (name one with --tickets), and can they reach this host?"
        )


def ticket_path(start: Launched, folder: str) -> Path:
    """The ticket of a start."""
    return Path(folder or ".").absolute() / f".distbelief-{start.launcher}-{start.name}.ticket"


def _write(path: Path, text: bytes) -> None:
    """Write a ticket that only its owner can read.

    Raises:
        UsageError: the folder keeps none.
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
    """A ticket; None where there is none (yet).

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
    """Have a connection end when the other host has not answered for as long as a line may be silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class Attendant:
    """Another of the processes, as the first one sees it; what an engine of a process here would be."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge, self.line = bridge, Channel(bridge.line, decode=OF_HOST)
        self.attend: AttendMeeting | None = None
        self.printed, self._prints = os.pipe()
        """It prints to where the launcher says, and nothing to here."""

    def take(self, word: ChannelMessage) -> None:
        """Take a word of it, before it is an agent."""
        if isinstance(word, AttendMeeting):
            self.attend = word

    def poll(self) -> int | None:
        """1 when it is gone."""
        return 1 if self.bridge.over else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is gone."""
        self.bridge.wait(0.0 if timeout is None else timeout)
        return 1

    def kill(self) -> None:
        """Have nothing to do with it any more: it ends when its line has."""
        self.bridge.cut()
        with contextlib.suppress(OSError):
            os.close(self._prints)


class Meeting:
    """The first of the processes: lets the others in until all are here, and appoints an agent for each host.

    Args:
        invitation: how the others get their ticket.
        interface: by whose address they reach this host; "" for any.

    Raises:
        UsageError: no ticket can be written there.
        JobFailed: not all have come in time, or one is of another version.
    """

    def __init__(self, invitation: Invitation, interface: str) -> None:
        from distbelief.places.join.authority import Authority  # with what it encrypts by

        self._invitation = invitation
        job = f"start {secrets.token_hex(8)}"
        authority, listener = Authority(job), listen_anywhere(CROWD)
        by_interface = own_addresses()
        addresses = by_interface.get(interface) or [address for several in by_interface.values() for address in several]
        port = listener.getsockname()[1]
        self._let_in: list[Attendant] = []
        self.attendants: dict[int, Attendant] = {}
        self.hosts: tuple[Host, ...] = ()
        self.restarts = invitation.here.restarts if invitation.here else 0
        """The most that the launcher counts on any host."""
        self.is_over = False
        self._agents: dict[str, tuple[Attendant | None, list[int]]] = {}
        """Agent to be of each host, None where this process starts it; and the host's processors."""
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
        """One host for each that has processes, in the order of their ranks, with the processors of all of them."""
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
        """Have all of the others end, with a status; who is an agent has ended what it has started first."""
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
"""Those of this process: of a launcher, and of each cluster of Ray."""


def meet(start: Launched, folder: str, interface: str) -> Meeting:
    """The meeting of the first of several processes that a launcher has started: held once."""
    if start.name not in _HELD:
        _HELD[start.name] = Meeting(TicketFile(start, folder), interface)
    if _HELD[start.name].is_over:
        raise UsageError(
            f"{start.launcher} has started this command {start.size} times, for one job, and that is over: start it "
            "again for the next one"
        )
    return _HELD[start.name]


def meet_by_ray(address: str, interface: str) -> Meeting:
    """The meeting of the nodes of a cluster of Ray: held once for each job."""
    key = f"ray:{address}"
    if key not in _HELD or _HELD[key].is_over:
        _HELD[key] = Meeting(RayInvitation(address), interface)
    return _HELD[key]


def attend(start: Launched, folder: str) -> int:
    """Be another of the processes until the job is over, the agent of its host where it is appointed that.

    Returns:
        The status of the job; 1 where the first process is gone.

    Raises:
        JobFailed: no ticket is found, or nobody answers who wrote it.
    """
    return _stay(start, _find(start, ticket_path(start, folder)))


def _stay(start: Launched, far: socket.socket) -> int:
    """Do what the first process says, until it dismisses this one; returns the status of the job."""
    assert isinstance(far, TlsSocket)
    keep_alive(far)
    bridge = Bridge(far)
    line = Channel(bridge.line, decode=OF_HOST)
    line.say(_attend(start))
    try:
        with signals.waitable():  # a launcher tells all of its processes to end: the first one sees to that
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
    """Come to the meeting of the ticket on standard input."""
    start, ticket = msgspec.json.decode(sys.stdin.buffer.readline(LIMIT), type=tuple[Launched, Ticket])
    try:
        far = reach(ticket)
    except OSError as error:
        raise SystemExit(f"nobody answers who made the ticket: {error}") from None
    raise SystemExit(_stay(start, far))


def _find(start: Launched, path: Path) -> socket.socket:
    """A connection to the first process, by its ticket, as soon as that is there."""
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
    """Return what this process is, and offers."""
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
