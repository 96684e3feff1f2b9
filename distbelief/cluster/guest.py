"""A guest of a job: a replica that joins it from any machine, watched by the process that started it there."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from distbelief import errors
from distbelief.cluster import forkserver, signals
from distbelief.cluster.channel import Channel, Failed, Interrupt, Listening, Noted, Over, Word
from distbelief.cluster.gate import Knock, Part, Sorry, Ticket, knock, read_ticket
from distbelief.core import records
from distbelief.errors import Interrupted, JobFailed
from distbelief.transport.secure import check_user

WAIT_SECONDS, PAUSE = 60.0, 0.5
"""How long to wait for a job that has not begun, and between two knocks."""
DOORS = 64
"""Guests of one job on one machine that `leave` can find."""


@dataclass
class Guest:
    """One replica that takes part in a job elsewhere, for as long as both want.

    Args:
        ticket: path of the job's ticket.
        script: of the user's own and its arguments, where the job runs one.
        data_dir, device, threads: as those of a job, here.
        tell: is handed what happens, in sentences.
    """

    ticket: str
    script: list[str] = field(default_factory=list)
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1
    tell: Any = print
    _over: bool = False
    _leaving: bool = False
    _failure: errors.DistbeliefError | None = None

    def run(self) -> None:
        """Join, and stay until the job is over or this guest is asked to leave: then what it has begun is finished first.

        Raises:
            DistbeliefError: it may not take part, or failed in its last life.
        """
        if self.script and self.data_dir:
            raise errors.UsageError(f"--data-dir {self.data_dir}: is of a task, and a script reads its data by itself: leave it off")
        ticket = read_ticket(self.ticket)
        door = _door(ticket)
        with signals.waitable() as woken, door or contextlib.nullcontext():
            word = Knock(ticket.job, ticket.secret, script=bool(self.script))
            part = self._ask(ticket, word, woken)
            while not self._live(part, woken, door):
                if part.incarnation >= part.restarts:
                    raise JobFailed(f"{part.role} died in each of its {part.restarts + 1} lives: look for the reason above, or in this machine's log")
                self.tell(f"{part.role} died; another takes its place")
                part = self._ask(ticket, msgspec.structs.replace(word, role=part.role, incarnation=part.incarnation), woken)

    def _ask(self, ticket: Ticket, word: Knock, woken: Connection) -> Part:
        """Knock until there is a part."""
        give_up = time.monotonic() + WAIT_SECONDS
        while isinstance(answer := knock(ticket, word), Sorry):
            if not answer.soon or time.monotonic() > give_up:
                raise JobFailed(f"there is no part in this job: {answer.reason}")
            if woken.poll(PAUSE):
                raise Interrupted("interrupted before the job had a part to give")
        self.tell(f"joined as {answer.role}")
        return answer

    def _live(self, part: Part, woken: Connection, door: socket.socket | None) -> bool:
        """One life, in a process of its own; whether it ended as it should."""
        from distbelief.cluster.process import main

        forkserver.start()  # with torch: who is refused has not waited for that
        process, ours = forkserver.fork(part.role, main, part.role, part.incarnation, self._spec(part))
        channel, self._over, self._failure = Channel(ours), False, None
        channel.say(Listening(part.coordinator))
        hears = True
        try:
            while process.is_alive():
                waiting: list[Any] = [process.sentinel, woken, *([ours] if hears else []), *([door] if door else [])]
                ready = set(map(id, multiprocessing.connection.wait(waiting)))
                if id(woken) in ready or (door and id(door) in ready and _is_ours(door)):
                    self._leave(channel, woken if id(woken) in ready else None)
                if id(ours) in ready:
                    hears = channel.hear_all(self._take)
            if hears:
                channel.hear_all(self._take)
        except BaseException:
            process.kill()
            raise
        finally:
            process.join()
            ours.close()
        failure: errors.DistbeliefError | None = self._failure
        if isinstance(failure, JobFailed) and not self._leaving:  # its link to somebody is gone: it may begin another life
            self.tell(str(failure))
        elif failure is not None:
            raise failure
        return process.exitcode == 0 and self._over

    def _spec(self, part: Part) -> bytes:
        """What the process must know: the job's part of it, and this machine's."""
        from distbelief.cluster.spec import Spec

        theirs = msgspec.msgpack.decode(part.spec, type=Spec)
        own = msgspec.structs.replace(
            theirs,
            data_dir=self.data_dir,
            device=self.device,
            threads=self.threads,
            supervisor=os.getpid(),
            forkserver=forkserver.pid(),
            path=[os.getcwd(), *sys.path],
            directory=os.getcwd(),
            environment=dict(os.environb),
            script=self.script,
        )
        return msgspec.msgpack.encode(own)

    def _leave(self, channel: Channel, woken: Connection | None) -> None:
        if woken is not None:
            woken.recv_bytes()
            if self._leaving:
                raise Interrupted("interrupted twice: ended at once, and what this replica held is dealt to others")
        self._leaving = True
        self.tell("leaving, once what has begun is applied")
        channel.say(Interrupt("this replica was asked to leave"))

    def _take(self, word: Word) -> None:
        if isinstance(word, Over):
            self._over = True
        elif isinstance(word, Failed):
            self._failure = getattr(errors, word.kind, JobFailed)(word.text)
            if word.trace and self._failure:
                self._failure.add_note(word.trace)
        elif isinstance(word, Noted) and isinstance(word.record, records.Note):
            self.tell(word.record.text)


def leave(path: str) -> int:
    """Ask every guest on this machine that a ticket let in to leave its job; returns how many were asked."""
    job, asked = read_ticket(path).job, 0
    for number in range(DOORS):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.connect(_name(job, number))
            check_user(door)
            asked += 1
    return asked


def _door(ticket: Ticket) -> socket.socket | None:
    """Where `leave` knocks; None where all are taken."""
    for number in range(DOORS):
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.bind(_name(ticket.job, number))
            door.listen(1)
        except OSError:
            door.close()
        else:
            return door
    return None


def _is_ours(door: socket.socket) -> bool:
    """Take one who knocks; whether he is a process of this user."""
    try:
        with door.accept()[0] as client:
            check_user(client)
    except OSError:
        return False
    return True


def _name(job: str, number: int) -> str:
    return f"\0distbelief-guest-{job}-{number}"
