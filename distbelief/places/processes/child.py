"""A process of a job, as whoever started it sees it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from distbelief.places.channel import Channel
from distbelief.places.messages import ChannelMessage
from distbelief.places.processes.output import Output


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
