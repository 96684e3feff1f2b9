"""Agent of another host, and the lives of roles there, as the supervisor sees them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

from distbelief.places.channel import MARK, OF_HOST, Channel
from distbelief.places.cluster.engines import StartedAgent, passed_on
from distbelief.places.messages import (
    ChannelMessage,
    Dismiss,
    EndRoles,
    Greeting,
    HostsReached,
    Looked,
    OpenJob,
    TellLife,
    ToldToEnd,
    WaysMeasured,
)

REMEDIES = {
    "Permission denied": "log in there once without a password: ssh-copy-id {host}",
    "Host key verification failed": "log in there once by hand, to accept its key: ssh {host} true",
    "Could not resolve": "mend its name, or write its address",
    "No route to host": "is it up, and is there a route to it?",
    "timed out": "is it up, and does a firewall let the remote shell in?",
    "Connection refused": "start its sshd, or name the port in ~/.ssh/config",
    "No module named": "install distbelief there, for that Python",
    "No space left": "make room on its disk",
    "No such file": "the working directory and Python must be at the same path on every host",
    "not found": "Python must be at the same path on every host",
}
"""Remedies, by the text in the output of an engine, or of a shell on a host."""
KEPT = 600
"""Number of characters that are kept of an agent's last output."""


class RemoteAgent:
    """Agent of a host: the line to it, and its answers.

    Args:
        name: the name of the host.
        started: the agent that its engine has begun to start.
        mark: the path of a file in the run folder.
    """

    def __init__(self, name: str, started: StartedAgent, mark: str = "") -> None:
        self._mark = mark
        self.name, self.line = name, Channel(started.line, decode=OF_HOST)
        self._process, self.printed, self._stays = started.process, started.printed, started.stays
        self.greeting: Greeting | None = None
        self.reached: HostsReached | None = None
        self.looked: Looked | None = None
        self.measured: WaysMeasured | None = None
        self.told_to_end = ""
        """Signal that has asked it to end; "" if none has."""
        self.clock_ahead = 0.0
        """Seconds by which its host's clock was ahead of this one when its greeting arrived."""
        self.address = ""
        """Address by which others reach its host."""
        self.heard = time.monotonic()
        self.stopped: list[int] = []
        """Numbers of the lives that are stopped by a signal."""
        self.gone = ""
        """Reason why it is gone; "" while it is there."""
        self.leaves = False
        """True if its host leaves a job that goes on."""
        self._before, self._last_words = b"", ""
        os.set_blocking(self.printed, False)

    def hear(self) -> None:
        """Receive its messages, send it the job once it has begun, and note why it is gone."""
        self.read_printed()
        before = self._before
        begun = self._find_mark()
        if before != MARK == self._before:
            self.line.say(OpenJob(self._mark, passed_on()))
        if (begun and not self.line.hear_all(self.take)) or self.over:
            self.gone = self.why()

    def _find_mark(self) -> bool:
        """Skip the output of a login shell before the agent begins; return whether it has begun."""
        try:
            while self._before != MARK and self.line.connection.poll():
                piece = os.read(self.line.connection.fileno(), 1)
                if not piece:
                    return False
                self._before = (self._before + piece)[-len(MARK) :]
        except OSError:
            return False
        return self._before == MARK

    def take(self, word: ChannelMessage) -> None:
        """Handle a message about the agent itself."""
        self.heard = time.monotonic()
        if isinstance(word, Greeting):
            self.greeting = word
            self.clock_ahead = word.clock - time.time()
        elif isinstance(word, Looked):
            self.looked = word
        elif isinstance(word, WaysMeasured):
            self.measured = word
        elif isinstance(word, ToldToEnd):
            self.told_to_end = word.why
        elif isinstance(word, HostsReached):
            self.reached = word

    def read_printed(self) -> list[str]:
        """Return new lines of output from it or its engine."""
        data = b""
        with contextlib.suppress(OSError):
            while piece := os.read(self.printed, 1 << 16):
                data += piece
        lines = data.decode(errors="replace").splitlines()
        self._last_words = " ".join([self._last_words, *lines])[-KEPT:].strip()
        return lines

    @property
    def over(self) -> bool:
        """True once the local process that started it has ended."""
        return self._process.poll() is not None

    def why(self) -> str:
        """Return the reason for its end, by its output, with the remedy."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its line has ended; its last output is there once it has exited
        self.read_printed()
        words = self._last_words or f"its agent ended, and said nothing (status {self._process.poll()})"
        remedy = next((advice for text, advice in REMEDIES.items() if text in words), "")
        return f"{words}; {remedy.format(host=self.name)}" if remedy else words

    def hang_up(self) -> None:
        """End its processes and the agent itself. An agent that stays ends only when it is dismissed."""
        if self._stays:
            self.line.say(EndRoles())
        else:
            self.line.close()

    def let_go(self) -> None:
        """Dismiss it, since its host leaves a job that goes on."""
        self.gone = "it has left"
        self.line.say(Dismiss(0))
        self.line.close()

    def reap(self, until: float) -> None:
        """Wait until a moment for the local process to end, then kill it."""
        if self._stays and not self.gone:
            os.close(self.printed)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        self._process.kill()
        self._process.wait()
        os.close(self.printed)


class RemoteLife:
    """One life of a role on another host."""

    def __init__(self, role: str, incarnation: int, number: int, agent: RemoteAgent) -> None:
        self.role, self.incarnation, self.number, self.agent = role, incarnation, number, agent
        self.pid = 0
        """Process id on its host; 0 until it is known."""

    def say(self, word: ChannelMessage) -> None:
        """Send it a message; do nothing if it has ended."""
        self.agent.line.say(TellLife(self.number, word))  # type: ignore[arg-type]  # any message of a supervisor
