"""Agent of a host: it starts, watches and ends the roles there, as the job's supervisor requests.

Its standard input and output are its line to the supervisor. When that line is closed, or silent for too long, the
agent ends with all processes that it has started.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import setproctitle

from distbelief.core.settings import read_strategy
from distbelief.errors import DistbeliefError, UsageError
from distbelief.places import signals
from distbelief.places.channel import BEAT_SECONDS, MARK, OF_HOST, SILENCE_SECONDS, Channel
from distbelief.places.cluster import launched, network
from distbelief.places.join.ticket import VERSION
from distbelief.places.messages import (
    AgentFailed,
    Beat,
    ChannelMessage,
    Dismiss,
    EndLife,
    EndRoles,
    Greeting,
    HostsReached,
    LifeEnded,
    LifeSaid,
    LifeStarted,
    Look,
    Looked,
    MeasureWays,
    Noted,
    OpenJob,
    Printed,
    ReachHosts,
    StartLife,
    StoppedLives,
    TellLife,
    ToldToEnd,
    WaysMeasured,
)
from distbelief.places.place import Ended, Event, Unable
from distbelief.places.processes import forkserver
from distbelief.places.processes.processes import Child, Processes
from distbelief.record import limits
from distbelief.strategies import find
from distbelief.transport.addresses import own_addresses


class Agent:
    """Agent that serves the requests on a line, until the line ends.

    Args:
        line: the line to the supervisor.
    """

    def __init__(self, line: Channel) -> None:
        self._line = line
        self._specs: dict[tuple[str, int], bytes] = {}
        self._lives: dict[tuple[str, int], int] = {}
        self._processes = Processes(self._spec, self._take, self._happens, self._print)
        self._way_server = network.WayServer()
        self._heard = self._beaten = time.monotonic()
        self._status = 1

    def run(self, woken: Connection) -> int:
        """Serve until the line ends; return the job's status, 1 if the supervisor has not sent it."""
        try:
            while self._turn(woken):
                pass
        finally:
            self._processes.close()
        return self._status

    def _turn(self, woken: Connection) -> bool:
        """Wait for the next event, and handle it; return False at the end."""
        waiting = [self._line.connection, woken, *self._processes.waitables]
        ready = set(map(id, multiprocessing.connection.wait(waiting, BEAT_SECONDS)))
        if id(woken) in ready:
            self._line.say(ToldToEnd(woken.recv_bytes().decode()))
        if id(self._line.connection) in ready and not self._line.hear_all(self._take_word):
            return False
        self._processes.look(ready)
        now = time.monotonic()
        if now > self._beaten + BEAT_SECONDS:
            self._beaten = now
            self._line.say(Beat())
            stopped = [child for child in self._processes.children if signals.is_stopped(child.pid)]
            self._line.say(StoppedLives([self._lives[child.role, child.incarnation] for child in stopped]))
        return now < self._heard + SILENCE_SECONDS

    def _take_word(self, word: ChannelMessage) -> None:
        self._heard = time.monotonic()
        match word:
            case OpenJob():
                os.environ.update(word.environment)
                self._line.say(greeting(self._way_server.port, word.mark))
            case ReachHosts() | Look() | MeasureWays():
                self._line.say(self._answer(word))
            case StartLife():
                self._specs[word.role, word.incarnation] = word.spec
                self._lives[word.role, word.incarnation] = word.life
                self._start(word)
            case EndLife():
                if (child := self._child(word.life)) is not None:
                    self._processes.end(child.role, child.incarnation)
            case EndRoles():
                self._processes.close()
            case Dismiss():
                self._status = word.status
            case TellLife():
                if (child := self._child(word.life)) is not None:
                    child.say(word.word)

    def _answer(self, word: ReachHosts | Look | MeasureWays) -> ChannelMessage:
        """Return the answer to a request that comes before any role is started."""
        match word:
            case ReachHosts():
                return HostsReached(network.try_all(word.others))
            case Look():
                return look(word)
        return WaysMeasured(network.measure_all(word.others))

    def _start(self, word: StartLife) -> None:
        try:
            self._processes.start(word.role, word.incarnation)
        except DistbeliefError as error:  # the job's strategy is not installed here
            self._line.say(AgentFailed(str(error)))
        if (child := self._child(word.life)) is not None:
            self._line.say(LifeStarted(word.life, child.pid))

    def _child(self, life: int) -> Child | None:
        return next(
            (child for child in self._processes.children if self._lives[child.role, child.incarnation] == life), None
        )

    def _spec(self, role: str, incarnation: int, output: int) -> bytes:
        """Return the spec of a process: the supervisor's part of it, with this host's."""
        from distbelief.places.processes.spec import Opening, Spec

        packed = self._specs.pop((role, incarnation))
        find(msgspec.msgpack.decode(packed, type=Opening).strategy)
        spec = msgspec.msgpack.decode(packed, type=Spec, dec_hook=read_strategy)
        processes = {"supervisor": os.getpid(), "forkserver": forkserver.pid(), "output": output}
        where = {"path": [os.getcwd(), *sys.path], "directory": os.getcwd(), "environment": dict(os.environb)}
        return msgspec.msgpack.encode(msgspec.structs.replace(spec, **processes, **where))

    # reports to the supervisor

    def _take(self, child: Child, word: ChannelMessage) -> None:
        life = self._lives[child.role, child.incarnation]
        age = max(0.0, time.monotonic() - word.moment) if isinstance(word, Noted) else 0.0
        self._line.say(LifeSaid(life, word, age))  # type: ignore[arg-type]  # any message of a process

    def _happens(self, event: Event) -> None:
        if isinstance(event, Unable):
            self._line.say(AgentFailed(str(event.error)))
        elif isinstance(event, Ended):
            life = self._lives[event.role, event.incarnation]
            self._line.say(LifeEnded(life, event.how, event.killed, event.done))

    def _print(self, child: Child, lines: list[str]) -> None:
        for text in lines:
            self._line.say(Printed(self._lives[child.role, child.incarnation], text))


def greeting(port: int, mark: str) -> Greeting:
    """Return the description of this host.

    Args:
        port: the port where others may try to reach it.
        mark: the path of a file in the run folder; a host that sees the file sees the folder.
    """
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    login = os.environ.get("SSH_CONNECTION", "").split()[0::2]
    return Greeting(
        VERSION, os.uname().nodename, limits.cores(), gpus, limits.free_memory(), network.network_identity(),
        own_addresses(), login, port, time.time(), os.path.exists(mark),
    )  # fmt: skip


def look(request: Look) -> Looked:
    """Return the reason why the data of a task are missing, "" if they are available."""
    lacks = ""
    if request.task:
        from distbelief.tasks import available  # imports torch

        try:
            lacks = available(request.task, request.data_dir or None) or ""
        except DistbeliefError as error:
            lacks = str(error)
    return Looked(lacks)


def serve(line: Channel) -> int:
    """Run the agent of this host; return the status of the job."""
    setproctitle.setproctitle("distbelief: agent")
    launched.forget(os.environ)
    forkserver.start()
    with signals.waitable() as woken:
        return Agent(line).run(woken)


def main() -> None:
    """Run the agent of this host, on standard input and output."""
    # Printed text is output of this host, and must not reach the line. Started processes do not inherit the line.
    line = Channel(Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False), OF_HOST)
    os.write(1, MARK)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed login also closes the line
    sys.path[:0] = [os.getcwd()]
    try:
        serve(line)
    except UsageError as error:  # this host cannot run our processes
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
