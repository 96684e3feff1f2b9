"""Engines: what starts an agent on a host, whose standard input and output are its line to the supervisor."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from distbelief.core.values import check_text
from distbelief.errors import UsageError

SSH = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6"),
)
"""Never asks anybody anything, says soon that a host is not there, and bears a longer silence than a line does."""
LOCAL = ("localhost", "127.0.0.1", "::1")
AGENT = "distbelief.places.cluster.agent"
PASSED_ON = ("DISTBELIEF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "CUDA_", "TORCH_")
"""Beginnings of the names of environment variables that hosts are told of."""


class Through(Protocol):
    """The process here through which an agent is, or what stands for one, with the calls of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return how it has ended; None where it has not."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired` where that does not come."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class StartedAgent(NamedTuple):
    """An agent that is being started, and what it says and prints."""

    process: Through
    line: Connection
    printed: int
    """A descriptor: the standard error of that process."""
    stays: bool = False
    """True if it is there after its part is over, until it is dismissed with the status of the job."""


class Engine(Protocol):
    """Starts agents. Ending one is the line's: closed, or silent for too long."""

    def start(self, host: str) -> StartedAgent:
        """Begin to start the agent of a host.

        Raises:
            UsageError: the engine is not installed.
        """
        ...


class RemoteShell:
    """Starts an agent as a command of a remote shell, such as ssh; on this machine itself, without one.

    Args:
        words: the shell and its options; it is called with a host and a command for the shell there.
    """

    def __init__(self, words: str = "ssh") -> None:
        self._words = shlex.split(words)
        if not self._words or shutil.which(self._words[0]) is None:
            raise UsageError(
                f"--remote-shell {words!r}: no such program here; install one (apt-get install openssh-client), or "
                "name another"
            )
        if os.path.basename(self._words[0]) == "ssh":
            self._words += SSH

    def start(self, host: str) -> StartedAgent:
        """Begin to start the agent of a host."""
        command = agent_command()
        here = host in (*LOCAL, socket.gethostname())
        return spawn(["sh", "-c", command] if here else [*self._words, host, command])


def agent_command() -> str:
    """Return what a shell on a host runs to be an agent."""
    return module_command(AGENT)


def module_command(module: str) -> str:
    """Return the command of a shell on a host: a module with this Python, in this directory."""
    paths = [os.path.abspath(path) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    words = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable, "-m", module]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def spawn(words: list[str]) -> StartedAgent:
    """Start a process whose standard input and output are a line, out of the reach of this terminal's Ctrl-C."""
    ours, theirs = socket.socketpair()
    printed, prints = os.pipe()
    try:
        process = subprocess.Popen(
            words, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=prints, start_new_session=True
        )
    finally:
        theirs.close()
        os.close(prints)
    return StartedAgent(process, Connection(ours.detach()), printed)


def passed_on() -> dict[str, str]:
    """The variables of this process's environment that hosts are told of.

    Raises:
        UsageError: one is no text.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    for name, value in variables.items():
        check_text(name + value, f"${name} {value!r}")
    return variables
