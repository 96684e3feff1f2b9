"""Processes of a measurement, which end with it in any case."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self

from distbelief.errors import JobFailed
from distbelief.places.processes import forkserver
from distbelief.places.processes.settle import settle_process

ANSWER_SECONDS = 120.0
"""Time limit for one word of a peer, in seconds."""
LEAVING = 200
"""Milliseconds in which an ending process closes all its pipes."""
GRACE = 1.0
"""Seconds in which a peer must end after its pipe was closed."""


class Peer:
    """A process, and the pipe to it."""

    def __init__(self, name: str, process: BaseProcess, connection: Connection) -> None:
        self.name, self.process, self.connection = name, process, connection

    def say(self, word: str = "") -> None:
        self.connection.send_bytes(word.encode())

    def hear(self, seconds: float = ANSWER_SECONDS) -> str:
        """Return the next word, or raise a `JobFailed` if the process has ended or takes too long."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv_bytes().decode()
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE)
            raise JobFailed(f"{self.name} ended with status {self.process.exitcode}; its own words are above") from None
        raise JobFailed(f"{self.name} said nothing for {seconds:.0f} s; is the machine overloaded?")


class Peers:
    """Processes of a measurement, which all end with the block."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # no process notices and reports another's end
            for peer in self._peers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.process.pid or 0, number)
        for peer in self._peers:
            peer.process.join()
            peer.connection.close()
        self._peers.clear()

    def start(self, name: str, threads: int, function: Callable[..., None], *args: object) -> Peer:
        """Run `function(connection, ...)` of a module in a process with some number of torch threads."""
        context = forkserver.context()
        forkserver.start()
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_play, args=(name, os.getpid(), threads, theirs, function, args), name=name, daemon=True
        )
        with forkserver.blank_main():
            process.start()
        theirs.close()
        peer = Peer(name, process, ours)
        self._peers.append(peer)
        return peer


def _play(
    name: str,
    supervisor: int,
    threads: int,
    connection: Connection,
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    settle_process(f"measures: {name}", threads, supervisor)
    try:
        function(connection, *args)
    except Exception:
        if not _left_alone(connection):
            raise


def _left_alone(connection: Connection) -> bool:
    """Return whether the other end of a pipe is closed, so that no process reads an error."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # a hang-up is always reported
    return bool(poll.poll(LEAVING))
