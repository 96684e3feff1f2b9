"""Processes of this machine as a place: each life of a role is one, started from a forkserver and heard through a
channel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from distbelief.errors import JobFailed
from distbelief.places import signals
from distbelief.places.channel import Channel
from distbelief.places.messages import ChannelMessage, Over
from distbelief.places.place import Ended, Event, Unable
from distbelief.places.processes import forkserver
from distbelief.places.processes.output import Output
from distbelief.record import limits

if TYPE_CHECKING:
    from distbelief.places.processes.spec import Spec

GRACE = 1.0
"""Seconds that a process whose descriptors are closed may take to be gone."""


BUSY = 0.05
"""Part of the time that a process uses the processor for, where it is said to compute."""


class Life(Protocol):
    """One life of a role that was started, wherever it is."""

    role: str
    incarnation: int

    @property
    def pid(self) -> int:
        """Id of its process, on its host."""
        ...

    def say(self, word: ChannelMessage) -> None:
        """Say a word to it; nothing, where it has ended."""
        ...


class Child:
    """One life of a role, in a process of its own."""

    def __init__(
        self, role: str, incarnation: int, process: BaseProcess, connection: Connection, output: Output | None = None
    ) -> None:
        self.role, self.incarnation, self.process, self.channel = role, incarnation, process, Channel(connection)
        self.output = output
        """Pipe that it prints into; None where that is what this process prints to."""
        self.open = True
        self.over = self.killed = False
        """It has played its role to the end; it was told to end at once."""

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None  # it has been started
        return self.process.pid

    def say(self, word: ChannelMessage) -> None:
        """Say a word to it; nothing, where it has ended."""
        self.channel.say(word)


class Hooks(NamedTuple):
    """Callbacks of whoever runs a job for the place of its processes."""

    spec: Callable[[str, int, int], bytes]
    """Makes what the process of a life of a role must know, encoded; with the descriptor that takes what it prints, -1
    where this process's own does.
    """
    take: Callable[[Life, ChannelMessage], None]
    """Is handed each word that one says."""
    happens: Callable[[Event], None]
    """Is told what the supervisor is to know."""
    note: Callable[[str], None]
    """Is told what the person who runs the job should read."""
    printed: Callable[[Life, list[str]], None]
    """Is handed what one prints."""
    host_printed: Callable[[str, list[str]], None]
    """Is handed a host's name, and what the program there that starts processes prints itself."""
    listens: bool
    """True if what processes of this machine print is to be handed on, and not just printed."""


class Processes:
    """Starts the processes of a job, hands on what they say, tells how each has ended, and leaves none behind.

    Args:
        spec: makes what the process of a life of a role must know, encoded.
        take: is handed each word that one says.
        happens: is told what the supervisor is to know.
        printed: is handed what one prints; None where they print to what this process prints to.
    """

    def __init__(
        self,
        spec: Callable[[str, int, int], bytes],
        take: Callable[[Child, ChannelMessage], None],
        happens: Callable[[Event], None],
        printed: Callable[[Child, list[str]], None] | None = None,
    ) -> None:
        self._spec, self._take, self._happens, self._printed = spec, take, happens, printed
        self._children: dict[tuple[str, int], Child] = {}
        self._used: dict[int, tuple[float, float]] = {}
        """Moment when it was last asked for its processor time, and the time that it had, by process id."""
        self._memory_kills = limits.memory_kills()
        """Processes killed for lack of memory whose reason is known."""

    def open(self, woken: Connection) -> None:
        """Be ready to start processes: of this machine, it is."""

    def spec_for(self, role: str, spec: Spec) -> Spec:
        """Return what the process of a role must know, where it is."""
        return spec

    @classmethod
    def of(cls, hooks: Hooks) -> Processes:
        """Those of a job."""
        return cls(hooks.spec, hooks.take, hooks.happens, hooks.printed if hooks.listens else None)

    @property
    def children(self) -> list[Child]:
        """Those that are there, in the order in which they were started."""
        return list(self._children.values())

    def start(self, role: str, incarnation: int) -> None:
        """Begin a life of a role; where the machine refuses, the supervisor is told so."""
        if how := forkserver.how_it_ended():
            self._happens(Unable(JobFailed(how)))
            return
        output: Output | None = None
        try:
            output = Output() if self._printed else None
            spec = self._spec(role, incarnation, output.writes if output else -1)
            process, ours = forkserver.fork(role, _play, role, incarnation, spec)
        except (OSError, EOFError) as error:  # the forkserver ends where it cannot fork
            if output:
                output.close()
            told = (
                f"{role}: its process cannot be started beside {len(self._children)} others "
                f"({error or type(error).__name__});"
                " have fewer --replicas or --shards, or raise what this machine allows (ulimit -n, ulimit -u)"
            )
            self._happens(Unable(JobFailed(told)))
            return
        self._children[role, incarnation] = Child(role, incarnation, process, ours, output)

    def end(self, role: str, incarnation: int) -> None:
        """End a life of a role at once; nothing, where it has ended already."""
        if (child := self._children.get((role, incarnation))) is not None:
            child.killed = True
            child.process.kill()

    def tell(self, role: str, word: ChannelMessage) -> None:
        """Say a word to the latest life of a role; nothing, where that has ended."""
        lives = [incarnation for one, incarnation in self._children if one == role]
        if lives:
            self._children[role, max(lives)].channel.say(word)

    def rename(self, role: str, to: str, incarnation: int) -> bool:
        """Have whoever plays a role play another from now on; whether anybody does."""
        child = next((child for child in self._children.values() if child.role == role), None)
        if child is None:
            return False
        del self._children[role, child.incarnation]
        child.role, child.incarnation = to, incarnation
        self._children[to, incarnation] = child
        return True

    @property
    def waitables(self) -> list[Any]:
        """Return what is ready as soon as a process has said something or ended."""
        connections = [child.channel.connection for child in self.children if child.open]
        printed = [child.output for child in self.children if child.output]
        return [*(child.process.sentinel for child in self.children), *connections, *printed]

    def look(self, ready: set[int]) -> None:
        """Hand on what is said on connections that are ready (by id), and tell who has ended."""
        for child in self.children:
            if id(child.output) in ready:
                self._hear_printed(child)
            if self._is_there(child) and id(child.channel.connection) in ready:
                child.open = child.channel.hear_all(partial(self._hear, child))
        for child in self.children:
            if self._is_there(child) and not child.process.is_alive():
                self._take_end(child)

    def _is_there(self, child: Child) -> bool:
        return self._children.get((child.role, child.incarnation)) is child

    def _hear(self, child: Child, word: ChannelMessage) -> None:
        if isinstance(word, Over):
            child.over = True
        self._take(child, word)

    def _hear_printed(self, child: Child, last: bool = False) -> None:
        if child.output and self._printed and (lines := child.output.lines(last)):
            self._printed(child, lines)
        if child.output and last:
            child.output.close()
            child.output = None

    def _take_end(self, child: Child) -> None:
        """A process has ended: hear its last words, and tell how it did."""
        if child.open:
            child.channel.hear_all(partial(self._hear, child))
        _reap(child)
        self._hear_printed(child, last=True)
        status = child.process.exitcode
        assert status is not None  # it has ended
        if status == forkserver.UNTOLD and (how := forkserver.how_it_ended(GRACE)):
            self._happens(Unable(JobFailed(how)))
            return
        child.channel.connection.close()
        del self._children[child.role, child.incarnation]
        how = f"its process ended with status {status}"
        if status < 0:
            how = f"its process was killed by {signal.Signals(-status).name}{self._lack(child, status)}"
        done = status == 0 and child.over
        self._happens(Ended(child.role, child.incarnation, how, killed=status < 0, done=done))

    def _lack(self, child: Child, status: int) -> str:
        """Return that the kernel killed a process since memory ran out, where that is so, and what to do."""
        if status != -signal.SIGKILL or child.killed or self._memory_kills >= limits.memory_kills():
            return ""
        self._memory_kills += 1
        return (
            ", since memory ran out (oom_kill): have fewer --replicas or a smaller --batch-size, or give this machine "
            "or its container more"
        )

    @property
    def busy(self) -> set[str]:
        """The roles whose processes, with all that these have started, compute: since this was last asked they have
        used the processor.
        """
        now, before = time.monotonic(), self._used
        self._used = {child.pid: (now, signals.processor_seconds(child.pid)) for child in self.children}
        return {
            child.role
            for child in self.children
            if child.pid in before
            and self._used[child.pid][1] - before[child.pid][1] > BUSY * (now - before[child.pid][0])
        }

    @property
    def stopped(self) -> dict[str, int]:
        """The roles whose processes are stopped by a signal, with their process ids."""
        return {child.role: child.pid for child in self.children if signals.is_stopped(child.pid)}

    def close(self) -> None:
        """Leave no process behind. They have nothing to do at such an end, and leave SIGTERM to this process."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            _reap(child)
            self._hear_printed(child, last=True)
            child.channel.connection.close()
        self._children.clear()


def _reap(child: Child) -> None:
    """Wait for a process to end, and end what it has started: a user's script is the first of a group of its own."""
    child.process.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _play(role: str, incarnation: int, spec: bytes, connection: Connection) -> None:
    """Play a role, in a process that the forkserver has begun; whoever asks for that need not import torch."""
    from distbelief.places.processes.process import main

    main(role, incarnation, spec, connection)
