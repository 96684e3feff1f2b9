"""Guest of a job: a replica that joins from any machine, supervised by the process that started it there."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from distbelief import errors
from distbelief.core import effects, records
from distbelief.errors import Interrupted
from distbelief.places import signals
from distbelief.places.join import join_server
from distbelief.places.join.ticket import Ticket, read_ticket
from distbelief.places.messages import ChannelMessage, Failed, JoinGrant, JoinRequest, Listening, Noted
from distbelief.places.place import NEVER, Effect, Event, Interruption, Said, Start, Tick, carry_out, check_leave_within
from distbelief.places.processes import forkserver
from distbelief.places.processes.options import host_towards
from distbelief.places.processes.processes import Child, Processes, here
from distbelief.places.processes.script import check_file
from distbelief.places.supervisor import Supervisor
from distbelief.strategies import find
from distbelief.transport.addresses import cut
from distbelief.transport.secure import check_user

TICK = 1.0
"""Seconds between two ticks of the supervisor."""
LEAVE_LISTENERS = 64
"""Most guests of one job on one machine that `leave` can reach."""


@dataclass
class Guest:
    """One replica that takes part in a job elsewhere, until the job or the guest ends that.

    Args:
        ticket: the path of the job's ticket.
        script: the user's script and its arguments, if the job runs one.
        data_dir, device, threads: the options of a job, for this machine.
        tell: prints sentences about the course of the job.
    """

    ticket: str
    script: list[str] = field(default_factory=list)
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1
    tell: Callable[[str], object] = print
    strategy: str = ""
    """The job's strategy, if it was written outside the package; no other such strategy is imported."""
    leave_within: float = 0.0
    """Seconds within which started work is finished, once this guest is asked to leave; 0 for no limit."""

    def run(self) -> None:
        """Join, and stay until the job is over, or this guest is asked to leave; it finishes started work first.

        Raises:
            DistbeliefError: the guest may not take part, or failed in its last life.
        """
        if self.script and self.data_dir:
            raise errors.UsageError(
                f"--data-dir {self.data_dir}: names the data of a task, but a script reads its own: leave it off"
            )
        if self.script:
            check_file(self.script)
        check_leave_within(self.leave_within, "give what was begun as long as it takes")
        if self.strategy:
            find(self.strategy)
        ticket = read_ticket(self.ticket)
        listener = open_leave_listener(ticket)
        with signals.waitable() as woken, listener or contextlib.nullcontext():
            _Stay(self, ticket, woken, listener).run()


class _Stay:
    """Participation of one guest: its supervisor, its process and its part. Its creation waits for the part."""

    def __init__(self, guest: Guest, ticket: Ticket, woken: Connection, listener: socket.socket | None) -> None:
        self._guest, self._ticket, self._woken, self._listener = guest, ticket, woken, listener
        self._request = JoinRequest(ticket.job, ticket.secret, script=bool(guest.script), strategy=guest.strategy)
        self._processes = Processes(self._spec, self._take, self._happens)
        self._part = self._ask()
        self._host = host_towards(cut(ticket.where[0])[0])
        """Address at which other replicas reach this one, if they need to."""
        self._supervisor = Supervisor(self._part.restarts, deadlines=NEVER, guest=True)

    def run(self) -> None:
        """Take part until the supervisor starts no life any more."""
        forkserver.start()  # imports torch, so it comes after the job has admitted the guest
        try:
            for effect in self._supervisor.begin([self._part.role]):
                self._do(effect)
            while self._processes.children and self._supervisor.failure is None:
                self._watch()
        finally:
            self._processes.close()
        if self._supervisor.failure is not None:
            raise self._supervisor.failure

    def _ask(self) -> JoinGrant:
        """Request a part of the job until there is one."""
        answer = join_server.take_part(self._ticket, self._request, self._pause)
        self._guest.tell(f"joined as {answer.role}")
        self._request = msgspec.structs.replace(self._request, role=answer.role, incarnation=answer.incarnation)
        return answer

    def _pause(self) -> None:
        if self._woken.poll(join_server.ASK_PAUSE):
            raise Interrupted("interrupted before the job had a part to give")

    def _start(self, role: str, incarnation: int) -> None:
        """Start a life of the replica; for any but the first, request another part from the job."""
        if incarnation > self._part.incarnation:
            self._part = self._ask()
        self._processes.start(role, incarnation)
        self._processes.tell(role, Listening(self._part.coordinator))

    def _watch(self) -> None:
        """Wait for messages, the end of the process, signals, and requests to leave."""
        listener = self._listener
        waiting = [self._woken, *([listener] if listener else []), *self._processes.waitables]
        ready = set(map(id, multiprocessing.connection.wait(waiting, TICK)))
        within = self._guest.leave_within
        if id(self._woken) in ready:
            self._happens(Interruption(self._woken.recv_bytes().decode(), within=within))
        elif listener and id(listener) in ready and is_ours(listener) and not self._supervisor.ending:
            self._happens(Interruption("distbelief leave", within=within))
        self._happens(Tick())
        self._processes.look(ready)

    def _take(self, child: Child, word: ChannelMessage) -> None:
        if isinstance(word, Failed):
            self._happens(Said(child.role, child.incarnation, word))
        elif isinstance(word, Noted) and isinstance(word.record, records.Note):
            self._guest.tell(word.record.text)

    def _happens(self, event: Event) -> None:
        for effect in self._supervisor.handle(time.monotonic(), event):
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case effects.WriteRecord(record=records.Note(text=text)):
                self._guest.tell(text)
            case Start():
                self._start(effect.role, effect.incarnation)
            case _:
                carry_out(self._processes, effect)

    def _spec(self, role: str, incarnation: int, output: int) -> bytes:
        """Return the spec of the process: the job's part of it, with this machine's."""
        guest = self._guest
        spec = join_server.spec_here(
            self._part,
            guest.strategy,
            self._host,
            data_dir=guest.data_dir,
            device=guest.device,
            threads=guest.threads,
            forkserver=forkserver.pid(),
            script=guest.script,
            **here(),
        )
        return msgspec.msgpack.encode(spec)


def leave(path: str) -> int:
    """Ask every guest on this machine that has this ticket to leave its job; return the number of guests asked."""
    job, count = read_ticket(path).job, 0
    for number in range(LEAVE_LISTENERS):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.connect(_name(job, number))
            check_user(asking)
            count += 1
    return count


def open_leave_listener(ticket: Ticket) -> socket.socket | None:
    """Return a listener for requests of `leave`; None if all addresses are taken."""
    for number in range(LEAVE_LISTENERS):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_name(ticket.job, number))
            listener.listen(1)
        except OSError:
            listener.close()
        else:
            return listener
    return None


def is_ours(listener: socket.socket) -> bool:
    """Accept a request to leave, and return whether it comes from a process of this user."""
    try:
        with listener.accept()[0] as client:
            check_user(client)
    except OSError:
        return False
    return True


def _name(job: str, number: int) -> str:
    return f"\0distbelief-guest-{job}-{number}"
