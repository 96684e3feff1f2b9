"""Agent of another host, and the lives of roles there, as the supervisor sees them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from multiprocessing.connection import Connection
from typing import Any

from distbelief.places import messages
from distbelief.places.channel import OF_HOST, Bridge, Channel
from distbelief.transport.secure import TlsSocket

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
    """Agent of a host, or another process of a launcher: the line to it, and its answers.

    Args:
        name: the name of its host; "" while that is not known.
        process: the local process that starts it, and ends with it. Without one, it stays after its part is over, until
            it is dismissed with the status of the job.
    """

    def __init__(self, name: str = "", process: subprocess.Popen[bytes] | None = None) -> None:
        ours, self._near = socket.socketpair()
        self.name, self.line = name, Channel(Connection(ours.detach()), decode=OF_HOST)
        self._process = process
        self._bridge: Bridge | None = None
        self.attend: messages.AttendMeeting | None = None
        """Its introduction; None until it has come."""
        self.processors: list[int] = []
        """Processors that its roles may use; none for all that it may."""
        self.greeting: messages.Greeting | None = None
        self.reached: messages.HostsReached | None = None
        self.measured: messages.WaysMeasured | None = None
        self.interrupted = ""
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
        self._last_words = ""
        if process is not None and process.stderr is not None:
            os.set_blocking(process.stderr.fileno(), False)

    def come(self, far: TlsSocket, attend: messages.AttendMeeting) -> None:
        """Let the agent, which has connected by its ticket, use its line; a thread of the server calls this.

        Raises:
            ConnectionError: it has come before.
        """
        if self._bridge is not None:
            raise ConnectionError(f"rank {attend.rank} has come already")
        introduced = Channel(Connection(self._near.dup().detach()))
        introduced.say(attend)
        introduced.close()
        self._bridge = Bridge(far, self._near)

    @property
    def waitables(self) -> list[Any]:
        """Objects that are ready once the agent, or the process that starts it, has sent something or ended."""
        return [self.line.connection, *([self._process.stderr] if self._process else [])]

    def hear(self) -> None:
        """Receive the agent's messages; once it is gone, note why."""
        self.read_printed()
        if not self.line.hear_all(self.take) or (self._process and self._process.poll() is not None):
            self.gone = self.why()

    def take(self, word: messages.ChannelMessage) -> None:
        """Handle a message about the agent itself."""
        self.heard = time.monotonic()
        if isinstance(word, messages.AttendMeeting):
            self.attend = word
        elif isinstance(word, messages.Greeting):
            self.greeting = word
            self.clock_ahead = word.clock - time.time()
        elif isinstance(word, messages.WaysMeasured):
            self.measured = word
        elif isinstance(word, messages.Interrupt):
            self.interrupted = word.reason
        elif isinstance(word, messages.HostsReached):
            self.reached = word

    def read_printed(self) -> list[str]:
        """Return new lines of output from it or its engine."""
        data = b""
        if self._process is not None and self._process.stderr is not None:
            with contextlib.suppress(OSError):
                while piece := os.read(self._process.stderr.fileno(), 1 << 16):
                    data += piece
        lines = data.decode(errors="replace").splitlines()
        self._last_words = " ".join([self._last_words, *lines])[-KEPT:].strip()
        return lines

    def why(self) -> str:
        """Return the reason for the agent's end, as its output shows it, with the remedy."""
        status = ""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # its line has ended: the last output is there once it has exited
            status = f" (status {self._process.poll()})"
        self.read_printed()
        words = self._last_words or f"its agent ended, and said nothing{status}"
        remedy = next((advice for text, advice in REMEDIES.items() if text in words), "")
        return f"{words}; {remedy.format(host=self.name)}" if remedy else words

    def hang_up(self) -> None:
        """End its processes and the agent itself. An agent that stays ends only when it is dismissed."""
        if self._process is None:
            self.line.say(messages.EndRoles())
        else:
            self.line.close()

    def dismiss(self, status: int) -> None:
        """Let the agent end with a status: the job is over, or the host leaves a job that goes on."""
        self.gone = self.gone or "it has left"
        self.line.say(messages.Dismiss(status))
        self.line.close()

    def reap(self, until: float) -> None:
        """Wait until a moment for the agent's end, then end it; one that stays must be dismissed first."""
        if self._process is None and not self.gone:
            return
        left = max(0.0, until - time.monotonic())
        if self._process is not None:
            assert self._process.stdin
            assert self._process.stderr
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(left)
            self._process.kill()
            self._process.wait()
            self._process.stderr.close()
        if self._bridge is None:
            self._near.close()
        elif not self._bridge.wait(left):
            self._bridge.cut()


class RemoteLife:
    """One life of a role on another host."""

    def __init__(self, role: str, incarnation: int, number: int, agent: RemoteAgent) -> None:
        self.role, self.incarnation, self.number, self.agent = role, incarnation, number, agent
        self.pid = 0
        """Process id on its host; 0 until it is known."""

    def say(self, word: messages.ChannelMessage) -> None:
        self.agent.line.say(messages.LifeMessage(self.number, word))  # type: ignore[arg-type]  # any message of a supervisor
