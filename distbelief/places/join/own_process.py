"""A user's own process as a replica of a running job, however it was started: by Python, a launcher, a notebook."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any

from distbelief.core import records, roles
from distbelief.core.conversations.membership import Finish
from distbelief.errors import DistbeliefError
from distbelief.places.channel import Channel, cut_off
from distbelief.places.join import join_server
from distbelief.places.join.guest import is_ours, open_leave_listener
from distbelief.places.join.ticket import read_ticket
from distbelief.places.messages import ChannelMessage, Interrupt, JoinRequest, Noted
from distbelief.places.processes.options import host_towards
from distbelief.places.processes.process import RoleProcess
from distbelief.runtime import loop
from distbelief.runtime.driver import Driver
from distbelief.transport.addresses import cut

LEAVE_SECONDS = 10.0
"""Limit in seconds for finishing started work, once this process is interrupted."""
TICKET = "DISTBELIEF_TICKET"
"""Environment variable that names the ticket file."""
_participation: OwnProcess | None = None


def join(ticket: str | os.PathLike[str] | None = None, *, device: str = "cpu") -> loop.Replica:
    """Return the replica that this process plays in a job.

    In a script that a job runs, it is the script's replica there. Otherwise it is a replica of the job that was started
    with --listen, and whose ticket is named. A program that a replica's process starts joins only if it names a ticket.

    An interrupt (Ctrl-C, or of a notebook's cell) leaves that job before it is raised. A process that takes part by
    another ticket already leaves that job first.

    Args:
        ticket: the path of the ticket; by default `DISTBELIEF_TICKET` names it.
        device: the device of the replica, as for a job's --device.

    Raises:
        UsageError: there is no ticket, or the file is not one; or the script of a replica started this process.
        JobFailed: the job is over, cannot be reached, or has no part for this process.
    """
    global _participation
    path = ticket or os.environ.get(TICKET, "")
    current = _participation if _participation is not None and _participation.replica.here else None
    # a loader's worker runs the lines of a script again, and must not become a replica of its own
    inherited = ticket is None or multiprocessing.parent_process() is not None
    if not path or (current is None and inherited and loop.PLAYED in os.environ):
        return loop.join()
    if current is not None and current.takes_part:
        if ticket is None:
            return current.replica
        current.leave()
    _participation = OwnProcess(os.fspath(path), device)
    return _participation.replica


class OwnProcess:
    """Participation of this process in a job.

    The user's loop runs turns of the driver, and computes in between. After an interrupt during a turn, the replica
    leaves the job in the next one. SIGINT is handled from the first turn in a cell on, since a notebook sets its own
    handler before each cell.
    """

    def __init__(self, path: str, device: str) -> None:
        ticket = read_ticket(path)
        request = JoinRequest(ticket.job, ticket.secret, script=True)
        part = join_server.take_part(ticket, request, lambda: time.sleep(join_server.ASK_PAUSE))
        spec = join_server.spec_here(part, "", host_towards(cut(ticket.where[0])[0]), device=device)
        with contextlib.ExitStack() as closing:
            ours, theirs = multiprocessing.Pipe()
            closing.callback(ours.close)
            closing.callback(theirs.close)
            self._words = Channel(ours)
            drive = functools.partial(_Driver, self._turning)
            self._process = RoleProcess(part.role, part.incarnation, spec, _Notes(theirs), drive)
            closing.callback(self._process.endpoint.close)
            closing.push(self._process.closing)
            self._process.driver.coordinator = part.coordinator
            self._listener = open_leave_listener(ticket)
            if self._listener is not None:
                closing.callback(self._listener.close)
                closing.callback(cut_off, self._listener)  # forked workers hold it too
                self._process.endpoint.watch(self._listener.fileno(), self._asked_to_leave)
            self._turns, self.takes_part, self._leave_by = False, True, math.inf
            self.replica = loop.current = self._process.scripted()
            os.environ[loop.PLAYED] = part.role
            self._closing = closing.pop_all()

    def leave(self) -> None:
        """Leave the job, and finish started work if possible."""
        try:
            with contextlib.suppress(DistbeliefError, KeyboardInterrupt):
                self.replica.leave()
        finally:
            self._end()

    def _end(self) -> None:
        """End the participation; work that was not finished is dealt to others."""
        if not self.takes_part:
            return
        self.takes_part, loop.current = False, None
        os.environ.pop(loop.PLAYED, None)
        if _handler() == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._process.driver.remove(self._process.role)
        self._closing.close()

    @contextlib.contextmanager
    def _turning(self) -> Iterator[Callable[[], bool]]:
        """Defer interrupts to the end of turns; yield a function that returns whether turns go on."""
        if self.takes_part and _handler() is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        self._turns = True
        try:
            yield lambda: time.monotonic() < self._leave_by
        except BaseException as error:
            self._end()
            if self._leave_by < math.inf and isinstance(error, Exception):
                raise KeyboardInterrupt from error
            raise
        finally:
            self._turns = False
        if self._leave_by < math.inf:  # a minibatch may have come before the request to leave
            self.leave()
            raise KeyboardInterrupt
        if not self._process.driver.plays(self._process.role):
            self._end()

    def _interrupt(self, *_: object) -> None:
        """Leave the job, then raise the interrupt; a second interrupt does not wait."""
        if self.replica.here and self._leave_by == math.inf:  # otherwise this is a worker forked from the process
            self._leave_by = time.monotonic() + LEAVE_SECONDS
            if self._turns:
                self._words.say(Interrupt("Ctrl-C"))
                self._process.clock.call_later(LEAVE_SECONDS, lambda _: None, None)  # ends a turn that still waits
                return
            self.leave()
        raise KeyboardInterrupt

    def _asked_to_leave(self) -> None:
        if self._listener is not None and is_ours(self._listener):
            self._process.driver.tell(self._process.role, roles.SUPERVISOR, Finish("distbelief leave"))


def _handler() -> object:
    """Return the handler of SIGINT; None outside the main thread, which alone may handle it."""
    return signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None


class _Driver(Driver):
    """Driver that is not interrupted during a turn."""

    def __init__(self, turning: Callable[[], AbstractContextManager[Callable[[], bool]]], *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._turning = turning

    def run_while(self, condition: Callable[[], bool], turn_until: Callable[[Sized], None] | None = None) -> None:
        with self._turning() as goes_on:
            super().run_while(lambda: condition() and goes_on(), turn_until)


class _Notes(Channel):
    """Channel of a process without a supervisor, which prints the job's notes."""

    def say(self, word: ChannelMessage) -> None:
        if isinstance(word, Noted) and isinstance(word.record, records.Note):
            print(word.record.text, file=sys.stderr)

    def hear_all(self, take: Callable[[ChannelMessage], None]) -> bool:
        super().hear_all(take)
        return True  # this end is never gone, since it is this process's own
