"""Agent of a host, `distbelief agent TICKET`: it starts, watches and ends roles there, as the job's supervisor asks.

Its ticket says where the supervisor listens. When the line there is closed, or silent for too long, the agent ends with
all processes that it has started.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import setproctitle

from distbelief.core.settings import read_strategy
from distbelief.errors import DistbeliefError, JobFailed, UsageError
from distbelief.places import messages, signals
from distbelief.places.channel import BEAT_SECONDS, OF_HOST, PARTING_SECONDS, SILENCE_SECONDS, Bridge, Channel
from distbelief.places.cluster import launched, network
from distbelief.places.join import ticket
from distbelief.places.place import Ended, Event, Unable
from distbelief.places.processes import forkserver
from distbelief.places.processes.processes import Child, Processes, here
from distbelief.record import limits
from distbelief.strategies import find
from distbelief.transport.addresses import own_addresses
from distbelief.transport.secure import TlsSocket


class Agent:
    """Agent that serves the requests on a line to the supervisor, until the line ends.

    The end of a connection in `ends` is the agent's end too.
    """

    def __init__(self, line: Channel, ends: Sequence[Connection] = ()) -> None:
        self._line, self._ends = line, ends
        self._specs: dict[tuple[str, int], bytes] = {}
        self._lives: dict[tuple[str, int], int] = {}
        self._processes = Processes(self._spec, self._take, self._happens, self._print)
        self._way_server = network.WayServer()
        self._heard = self._beaten = time.monotonic()
        self._status = 1

    def run(self, job: messages.OpenJob, woken: Connection) -> int:
        """Serve a job until the line ends; return the job's status, 1 if the supervisor has not sent it."""
        setproctitle.setproctitle("distbelief: agent")
        if job.processors:
            os.sched_setaffinity(0, job.processors)
        launched.forget(os.environ)
        os.environ.update(job.environment)
        try:
            forkserver.start()
            self._line.say(greeting(self._way_server.port, job))
            while self._turn(woken):
                pass
        finally:
            self._processes.close()
        return self._status

    def _turn(self, woken: Connection) -> bool:
        """Wait for the next event, and handle it; return False at the end."""
        waiting = [self._line.connection, woken, *self._ends, *self._processes.waitables]
        ready = set(map(id, multiprocessing.connection.wait(waiting, BEAT_SECONDS)))
        if id(woken) in ready:
            self._line.say(messages.Interrupt(woken.recv_bytes().decode()))
        if id(self._line.connection) in ready and not self._line.hear_all(self._take_word):
            return False
        if ready.intersection(map(id, self._ends)):
            return False
        self._processes.look(ready)
        now = time.monotonic()
        if now > self._beaten + BEAT_SECONDS:
            self._beaten = now
            stopped = [child for child in self._processes.children if signals.is_stopped(child.pid)]
            self._line.say(messages.StoppedLives([self._lives[child.role, child.incarnation] for child in stopped]))
        return now < self._heard + SILENCE_SECONDS

    def _take_word(self, word: messages.ChannelMessage) -> None:
        self._heard = time.monotonic()
        match word:
            case messages.ReachHosts():
                self._line.say(messages.HostsReached(network.try_all(word.others)))
            case messages.MeasureWays():
                self._line.say(messages.WaysMeasured(network.measure_all(word.others)))
            case messages.StartLife():
                self._specs[word.role, word.incarnation] = word.spec
                self._lives[word.role, word.incarnation] = word.life
                self._start(word)
            case messages.EndLife():
                if (child := self._child(word.life)) is not None:
                    self._processes.end(child.role, child.incarnation)
            case messages.EndRoles():
                self._processes.close()
            case messages.Dismiss():
                self._status = word.status
            case messages.LifeMessage():
                if (child := self._child(word.life)) is not None:
                    child.say(word.word)

    def _start(self, word: messages.StartLife) -> None:
        try:
            self._processes.start(word.role, word.incarnation)
        except DistbeliefError as error:  # the job's strategy is not installed here
            self._line.say(messages.Failed("", str(error)))
        if (child := self._child(word.life)) is not None:
            self._line.say(messages.LifeStarted(word.life, child.pid))

    def _child(self, life: int) -> Child | None:
        return next(
            (child for child in self._processes.children if self._lives[child.role, child.incarnation] == life), None
        )

    def _spec(self, role: str, incarnation: int, output: int) -> bytes:
        """Return the spec of a process: the part that the supervisor sent, and the part of this host."""
        from distbelief.places.processes.spec import Opening, Spec

        packed = self._specs.pop((role, incarnation))
        find(msgspec.msgpack.decode(packed, type=Opening).strategy)
        spec = msgspec.msgpack.decode(packed, type=Spec, dec_hook=read_strategy)
        spec = msgspec.structs.replace(spec, **here(), forkserver=forkserver.pid(), output=output)
        return msgspec.msgpack.encode(spec)

    # reports to the supervisor

    def _take(self, child: Child, word: messages.ChannelMessage) -> None:
        life = self._lives[child.role, child.incarnation]
        age = max(0.0, time.monotonic() - word.moment) if isinstance(word, messages.Noted) else 0.0
        self._line.say(messages.LifeMessage(life, word, age))  # type: ignore[arg-type]  # any message of a process

    def _happens(self, event: Event) -> None:
        if isinstance(event, Unable):
            self._line.say(messages.Failed("", str(event.error)))
        elif isinstance(event, Ended):
            life = self._lives[event.role, event.incarnation]
            self._line.say(messages.LifeEnded(life, event.how, event.killed, event.done))

    def _print(self, child: Child, lines: list[str]) -> None:
        for text in lines:
            self._line.say(messages.Printed(self._lives[child.role, child.incarnation], text))


def greeting(port: int, job: messages.OpenJob) -> messages.Greeting:
    """Return the description of this host, for a job; `port` is where others may try to reach it."""
    lacks = _lacks(job.task, job.data_dir)  # takes seconds, so it comes before the clock is read
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    login = os.environ.get("SSH_CONNECTION", "").split()[0::2]
    return messages.Greeting(
        limits.cores(), gpus, limits.free_memory(), own_addresses(), login, port, time.time(), os.path.exists(job.mark),
        lacks,
    )  # fmt: skip


def _lacks(task: str, data_dir: str) -> str:
    """Return the reason why the data of a task are missing; "" if they are available."""
    if not task:
        return ""
    from distbelief.tasks import available  # imports torch

    try:
        return available(task, data_dir or None) or ""
    except DistbeliefError as error:
        return str(error)


def introduction(start: launched.Launched) -> messages.AttendMeeting:
    """Return the introduction of this process to the one that made its ticket."""
    return messages.AttendMeeting(
        start.rank, start.local_rank, network.network_identity(), launched.hostname(), sorted(os.sched_getaffinity(0)),
        start.cores, limits.quota(), ticket.VERSION, start.restarts,
    )  # fmt: skip


def attend(far: socket.socket, start: launched.Launched, ends: Sequence[Connection] = ()) -> int:
    """Serve the process that made the ticket: as this host's agent if it opens a job, else until its job is over.

    Return the status of the job; 1 where the other process is gone. `far` is the connection to that process. `start` is
    the place of this process among those that have the ticket. `ends` are as for `Agent`.
    """
    assert isinstance(far, TlsSocket)
    ticket.say(far, introduction(start))
    ours, near = socket.socketpair()
    bridge, line = Bridge(far, near), Channel(Connection(ours.detach()), decode=OF_HOST)
    try:
        with signals.waitable() as woken:  # a launcher signals all its processes, and the first one handles the signal
            if ends:
                setproctitle.setproctitle("distbelief: agent")
                if woken in multiprocessing.connection.wait([line.connection, woken, *ends]):
                    line.say(messages.Interrupt(woken.recv_bytes().decode()))
            match line.hear():
                case messages.OpenJob() as job:
                    return Agent(line, ends).run(job, woken)
                case messages.Dismiss() as dismissed:
                    return dismissed.status
            return 1
    finally:
        line.close()
        bridge.wait(PARTING_SECONDS)


def main(words: Sequence[str]) -> int:
    """Run `distbelief agent TICKET`; `-` is a ticket on standard input, whose end is then the agent's too.

    Raises:
        UsageError: there is no ticket, or this host cannot run processes of a job.
        JobFailed: the process that made the ticket does not answer.
    """
    if len(words) != 1:
        raise UsageError("distbelief agent TICKET: a job's engine starts it; join a job with distbelief join TICKET")
    held = ticket.read_ticket(words[0])
    if held.holder is None:
        raise UsageError(f"{words[0]} is no ticket of an agent: join that job with distbelief join {words[0]}")
    ends = [Connection(os.dup(0), writable=False)] if words[0] == "-" else []
    with open(os.devnull) as nothing:  # started processes do not inherit the input, and their output is this host's
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed login also closes the input
    sys.path[:0] = [os.getcwd()]
    forkserver.start()  # the forkserver imports torch while this process looks for the other one
    try:
        far = ticket.reach(held)
    except OSError as error:
        raise JobFailed(
            f"it cannot reach the command's host: {error}; open the ports between the hosts, or mend the route"
        ) from error
    return attend(far, held.holder, ends)
