"""Processes of this machine: one for each incarnation of a role, started by a forkserver and connected by a channel."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
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
"""Seconds that a process may take to end once its descriptors are closed."""
BUSY = 0.05
"""Least share of the time that a busy process uses the processor."""


class Life(Protocol):
    """Incarnation of a role that was started, on any host."""

    role: str
    incarnation: int

    @property
    def pid(self) -> int:
        """Return the id of its process, on its host."""

    def say(self, word: ChannelMessage) -> None:
        """Send it a message; do nothing if it has ended."""


class Child:
    """Incarnation of a role in a process of this machine."""

    def __init__(
        self, role: str, incarnation: int, process: BaseProcess, connection: Connection, output: Output | None = None
    ) -> None:
        self.role, self.incarnation, self.process, self.channel = role, incarnation, process, Channel(connection)
        self.output = output
        """Pipe into which it prints; None if it prints to the streams of this process."""
        self.open = True
        self.over = self.killed = False
        """Flags: it has played its role to the end; this process has killed it."""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None  # the process has been started
        return self.process.pid

    def say(self, word: ChannelMessage) -> None:
        self.channel.say(word)


class Hooks(NamedTuple):
    """Callbacks for the place in which the processes of a job run."""

    spec: Callable[[str, int, int], bytes]
    """Maker of the encoded spec of a process, from its role, its incarnation and the descriptor of its output.

    The descriptor is -1 if it prints to the streams of this process.
    """
    take: Callable[[Life, ChannelMessage], None]
    """Receiver of each message of a process."""
    happens: Callable[[Event], None]
    """Receiver of events for the supervisor."""
    note: Callable[[str], None]
    """Receiver of notes for the person who runs the job."""
    printed: Callable[[Life, list[str]], None]
    """Receiver of the lines that a process prints."""
    host_printed: Callable[[str, list[str]], None]
    """Receiver of a host's name, and of lines printed by the program that starts processes there."""
    listens: bool
    """True if the output of processes of this machine goes to `printed`, and not to the streams of this process."""


class Processes:
    """Processes of a job on this machine: it starts them, passes on their messages and ends, and leaves none behind.

    Its callbacks are those of `Hooks`; without `printed`, the processes print to the streams of this one.
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
        """Moment when `busy` was last read, and processor time until then, by process id."""
        self._memory_kills = limits.memory_kills()
        """Number of kills for lack of memory that are already explained."""

    def open(self, woken: Connection) -> None:
        """Prepare to start processes: nothing is needed on this machine."""

    def spec_for(self, role: str, spec: Spec) -> Spec:
        """Return the spec of a role's process for the host on which it starts: the same one, on this machine."""
        return spec

    @classmethod
    def of(cls, hooks: Hooks) -> Processes:
        return cls(hooks.spec, hooks.take, hooks.happens, hooks.printed if hooks.listens else None)

    @property
    def children(self) -> list[Child]:
        """Return the processes that have not ended, in the order in which they were started."""
        return list(self._children.values())

    def start(self, role: str, incarnation: int) -> None:
        if how := forkserver.how_it_ended():
            self._happens(Unable(JobFailed(how)))
            return
        output: Output | None = None
        try:
            output = Output() if self._printed else None
            spec = self._spec(role, incarnation, output.writes if output else -1)
            process, ours = forkserver.fork(role, _play, role, incarnation, spec)
        except (OSError, EOFError) as error:  # the forkserver ends if it cannot fork
            if output:
                output.close()
            told = (
                f"{role}: its process cannot be started beside {len(self._children)} others "
                f"({error or type(error).__name__}); have fewer --replicas or --shards, or raise what this machine "
                "allows (ulimit -n, ulimit -u)"
            )
            self._happens(Unable(JobFailed(told)))
            return
        self._children[role, incarnation] = Child(role, incarnation, process, ours, output)

    def end(self, role: str, incarnation: int) -> None:
        if (child := self._children.get((role, incarnation))) is not None:
            child.killed = True
            child.process.kill()

    def tell(self, role: str, word: ChannelMessage) -> None:
        lives = [incarnation for one, incarnation in self._children if one == role]
        if lives:
            self._children[role, max(lives)].channel.say(word)

    def rename(self, role: str, to: str, incarnation: int) -> bool:
        """Note that the process of a role now plays another role; return whether there is such a process."""
        child = next((child for child in self._children.values() if child.role == role), None)
        if child is None:
            return False
        del self._children[role, child.incarnation]
        child.role, child.incarnation = to, incarnation
        self._children[to, incarnation] = child
        return True

    @property
    def waitables(self) -> list[Any]:
        """Return the objects to wait for: one is ready when a process has sent or printed something, or has ended."""
        connections = [child.channel.connection for child in self.children if child.open]
        printed = [child.output for child in self.children if child.output]
        return [*(child.process.sentinel for child in self.children), *connections, *printed]

    def look(self, ready: set[int]) -> None:
        """Pass on messages from connections that are ready (by id), and the ends of processes."""
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
        """Pass on the last messages of a process that has ended, and the way in which it ended."""
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
        """Return the reason and the remedy if the kernel killed a process because memory ran out; else ""."""
        if status != -signal.SIGKILL or child.killed or self._memory_kills >= limits.memory_kills():
            return ""
        self._memory_kills += 1
        return (
            ", because memory ran out (oom_kill): have fewer --replicas or a smaller --batch-size, or give this "
            "machine or its container more"
        )

    @property
    def busy(self) -> set[str]:
        """Return the roles whose processes have used the processor since the last look at this property.

        The processes that they have started count too.
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
        """Return the process ids of roles whose processes are stopped by a signal."""
        return {child.role: child.pid for child in self.children if signals.is_stopped(child.pid)}

    def close(self) -> None:
        """Kill all processes. SIGTERM would not end them: they leave that signal to this process."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            _reap(child)
            self._hear_printed(child, last=True)
            child.channel.connection.close()
        self._children.clear()


def here() -> dict[str, Any]:
    """Return the surroundings of this process, as the fields of `Surroundings` for those that it starts."""
    folder = os.getcwd()
    where = {"path": [folder, *sys.path], "directory": folder}
    return {"supervisor": os.getpid(), "environment": dict(os.environb), **where}


def _reap(child: Child) -> None:
    """Wait for the end of a process, and kill those that it has started: a user's script leads its own group."""
    child.process.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _play(role: str, incarnation: int, spec: bytes, connection: Connection) -> None:
    """Play a role in a process that the forkserver has started."""
    from distbelief.places.processes.process import main  # imported here, since the supervisor need not import torch

    main(role, incarnation, spec, connection)
