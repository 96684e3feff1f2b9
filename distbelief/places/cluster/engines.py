"""Engines, which start agents on hosts; an agent's standard input and output are its line to the supervisor."""

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
"""Options of ssh: never prompt, report soon that a host is not there, and bear a longer silence than a line does."""
LOCAL = ("localhost", "127.0.0.1", "::1")
AGENT = "distbelief.places.cluster.agent"
PASSED_ON = ("DISTBELIEF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "CUDA_", "TORCH_")
"""Prefixes of the environment variables that are passed on to hosts."""
KEPT_BACK = ("DISTBELIEF_ROLE", "DISTBELIEF_TICKET")
"""Variables about this process's own part in a job."""


class Through(Protocol):
    """Local process that connects to an agent, or a substitute for one, with the methods of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return its exit status; None if it has not ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired` if it does not end in time."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


class StartedAgent(NamedTuple):
    """An agent that is being started, with its line and its output."""

    process: Through
    line: Connection
    printed: int
    """File descriptor of the process's standard error."""
    stays: bool = False
    """True if it remains after its part is over, until it is dismissed with the status of the job."""


class Engine(Protocol):
    """Engine that starts agents. An agent ends when its line is closed, or silent for too long."""

    def start(self, host: str) -> StartedAgent:
        """Begin to start the agent of a host.

        Raises:
            UsageError: the engine is not installed.
        """
        ...


class RemoteShell:
    """Engine that starts an agent by a remote shell, such as ssh; on this machine itself, without one.

    Args:
        words: the shell and its options; it gets a host, and a command for the shell there.
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
    """Return the command that starts an agent in a host's shell."""
    return module_command(AGENT)


def module_command(module: str) -> str:
    """Return the command that runs a module in a host's shell, with this Python and in this directory."""
    paths = [os.path.abspath(path) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    words = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable, "-m", module]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def spawn(words: list[str]) -> StartedAgent:
    """Start a process with a line as standard input and output, which this terminal's Ctrl-C does not reach."""
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
    """Return the environment variables of this process that are passed on to hosts.

    Raises:
        UsageError: a value is not valid text.
    """
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) and name not in KEPT_BACK
    }
    for name, value in variables.items():
        check_text(name + value, f"${name} {value!r}")
    return variables
