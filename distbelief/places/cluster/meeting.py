"""Meeting of the processes that a launcher has started.

The first listens, and writes a ticket into a folder that all hosts share. The others read the ticket, and connect. One
process of each host becomes its agent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from distbelief.errors import JobFailed, UsageError
from distbelief.places.channel import PARTING_SECONDS
from distbelief.places.cluster import agent
from distbelief.places.cluster.agent import introduction
from distbelief.places.cluster.engines import Engine, agent_command
from distbelief.places.cluster.hosts import Host
from distbelief.places.cluster.launched import Launched
from distbelief.places.cluster.ray_cluster import RayInvitation
from distbelief.places.cluster.remote_agent import RemoteAgent
from distbelief.places.join.ticket import Ticket, reach, read_ticket
from distbelief.places.messages import AttendMeeting
from distbelief.record.folder import OWNER_ALONE, written_whole

MEET_SECONDS = 45.0
"""Limit in seconds for all processes to come together."""
PAUSE = 0.1


class Invitation(Protocol):
    """Invitation that hands the ticket to the other processes of a job."""

    ranks: range
    """Ranks of the other processes."""
    here: Launched | None
    """The first process, if it offers slots itself."""

    def send(self, ticket: Ticket) -> None:
        """Hand the ticket out, or raise a UsageError."""

    def check(self) -> None:
        """Raise a JobFailed if some of the processes will never come."""

    def withdraw(self) -> None:
        """Withdraw the ticket: all processes have come, or the wait is over."""

    def close(self) -> None:
        """Release the resources: the job is over."""

    def late(self, missing: list[int]) -> str:
        """Return the message that some ranks have not come, with the remedy."""


class TicketFile:
    """Invitation for the processes of a launcher: a ticket file in a folder that all hosts share.

    A folder of "" is the working directory.
    """

    def __init__(self, start: Launched, folder: str) -> None:
        self.here: Launched | None = start
        self.ranks = range(1, start.size)
        self.path, self._start = ticket_path(start, folder), start
        self._sent: bytes | None = None

    def send(self, ticket: Ticket) -> None:
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
    """Write a ticket that only its owner can read."""
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


class Meeting(Engine):
    """Meeting held by the first process, which admits the others until all are here, and chooses the hosts' agents.

    Raises:
        UsageError: no ticket can be handed out.
        JobFailed: not all have come in time, or one is gone.
    """

    def __init__(self, invitation: Invitation, interface: str) -> None:
        super().__init__(interface)
        self._invitation = invitation
        self.hosts: tuple[Host, ...] = ()
        self.restarts = invitation.here.restarts if invitation.here else 0
        """Largest number of restarts that the launcher counts on any host."""
        self.is_over = False
        self._others = {rank: RemoteAgent() for rank in invitation.ranks}
        self._agents: dict[str, tuple[RemoteAgent | None, list[int]]] = {}
        """Agent of each host, with the host's processors; None for an agent that this process starts."""
        self._expected.update(self._others)
        atexit.register(invitation.withdraw)
        try:
            invitation.send(self._ticket)
            self._gather()
        except BaseException:
            self.dismiss(1)
            raise
        finally:
            invitation.withdraw()
            atexit.unregister(invitation.withdraw)
        self._name_hosts()

    def _gather(self) -> None:
        end = time.monotonic() + MEET_SECONDS
        while missing := [rank for rank, other in self._others.items() if other.attend is None]:
            self._invitation.check()
            wait([other.line.connection for other in self._others.values()], PAUSE)
            for other in self._others.values():
                other.hear()
                if other.gone:
                    raise JobFailed(f"host {other.attend and other.attend.hostname}: {other.gone}")
            if time.monotonic() > end:
                raise JobFailed(f"within {MEET_SECONDS:.0f} s, {self._invitation.late(missing)}")

    def _name_hosts(self) -> None:
        """Name the hosts in the order of their ranks, each with the processors of all its processes."""
        by_network: dict[str, list[tuple[AttendMeeting, RemoteAgent | None]]] = {}
        if self._invitation.here:
            mine = introduction(self._invitation.here)
            by_network[mine.network] = [(mine, None)]
        for _, other in sorted(self._others.items()):
            assert other.attend
            self.restarts = max(self.restarts, other.attend.restarts)
            by_network.setdefault(other.attend.network, []).append((other.attend, other))
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
            if agent is not None:
                agent.name, agent.processors = name, processors
            allotted = max(attend.cores for attend, _ in several) or len(processors)
            hosts.append(Host(name, min(allotted, first.quota)))
        self.hosts = tuple(hosts)

    def start(self, host: str) -> RemoteAgent:
        agent, processors = self._agents[host]
        if agent is not None:
            return agent
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, processors)  # a launcher may have bound this process to one of them
        try:
            return self._spawn(host, ["sh", "-c", agent_command()])
        finally:
            os.sched_setaffinity(0, before)

    def dismiss(self, status: int) -> None:
        """Let all other processes end with a status; agents end the processes that they have started first."""
        self.is_over = True
        self.close()
        for other in self._others.values():
            other.dismiss(status)
        end = time.monotonic() + PARTING_SECONDS
        for other in self._others.values():
            other.reap(end)
        self._others.clear()
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

    Return the status of the job, 1 where the first process is gone.

    Raises:
        JobFailed: no ticket is found, or its writer does not answer.
    """
    return agent.attend(_find(start, ticket_path(start, folder)), start)


def _find(start: Launched, path: Path) -> socket.socket:
    """Return a connection to the first process, as soon as its ticket is there."""
    end = time.monotonic() + MEET_SECONDS
    why = f"there is no {path}: is its folder one that all hosts share? Name one with --tickets"
    while time.monotonic() < end:
        if path.exists():
            try:
                return reach(read_ticket(path, private=True))
            except OSError as error:
                why = f"the writer of {path} does not answer: {error}; open the ports between hosts, or mend the route"
        time.sleep(PAUSE)
    raise JobFailed(
        f"process {start.rank} of the {start.size} that {start.launcher} has started does not find the first one: {why}"
    )
