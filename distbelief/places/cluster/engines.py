"""Engines, which start agents on hosts, each by `distbelief agent TICKET`; and the server that the agents come to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property

import msgspec

from distbelief.core import roles
from distbelief.core.values import check_text
from distbelief.errors import UsageError
from distbelief.places.cluster.hosts import MOST_HOSTS
from distbelief.places.cluster.launched import Launched
from distbelief.places.cluster.remote_agent import RemoteAgent
from distbelief.places.join.ticket import CROWD, GUEST, LIMIT, Ticket, TicketServer, hear
from distbelief.places.messages import AttendMeeting
from distbelief.transport.addresses import joined, listen_anywhere, own_addresses
from distbelief.transport.secure import TlsSocket

SSH = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6"),
)
"""Options of ssh: never prompt, report soon that a host is not there, and bear a longer silence than a line does."""
LOCAL = ("localhost", "127.0.0.1", "::1")
PASSED_ON = ("DISTBELIEF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "CUDA_", "TORCH_")
"""Prefixes of the environment variables that are passed on to hosts."""
KEPT_BACK = ("DISTBELIEF_ROLE", "DISTBELIEF_TICKET")
"""Variables about this process's own part in a job."""


class Engine:
    """Way to start agents on hosts, and the server that lets them in, each by its ticket.

    An agent ends when its line is closed, or silent for too long. `interface` is the network interface by whose address
    agents reach this host; "" for any.
    """

    def __init__(self, interface: str = "") -> None:
        self._interface = interface
        self._expected: dict[int, RemoteAgent] = {}
        """Agents that may come, by rank."""
        self._server: TicketServer | None = None

    def start(self, host: str) -> RemoteAgent:
        """Begin to start the agent of a host."""
        raise NotImplementedError

    def close(self) -> None:
        """Let no more agents in: all have come, or are no longer waited for."""
        if self._server is not None:
            self._server.close()

    @cached_property
    def _ticket(self) -> Ticket:
        """Ticket of the agents; this process listens from its first use on."""
        from distbelief.places.join.authority import Authority  # imports cryptography

        job = f"agents {secrets.token_hex(8)}"
        authority, listener, by_interface = Authority(job), listen_anywhere(2 * CROWD), own_addresses()
        identity = authority.issue(roles.SUPERVISOR)
        self._server = TicketServer(listener, identity, self._let_in, keeps=True, crowd=MOST_HOSTS)
        interfaces = [by_interface[self._interface]] if self._interface in by_interface else by_interface.values()
        port = listener.getsockname()[1]
        where = [joined(address, port) for addresses in interfaces for address in addresses]
        return Ticket(job, where, "", authority.issue(GUEST))

    def _let_in(self, far: socket.socket) -> None:
        assert isinstance(far, TlsSocket)
        attend = msgspec.msgpack.decode(hear(far, LIMIT), type=AttendMeeting)
        if attend.rank not in self._expected:
            raise ConnectionError(f"nobody of rank {attend.rank} is expected")
        self._expected[attend.rank].come(far, attend)

    def _spawn(self, host: str, words: Sequence[str]) -> RemoteAgent:
        """Begin to start the agent of a host by a local process, which this terminal's Ctrl-C does not reach."""
        process = subprocess.Popen(
            words, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        rank = len(self._expected) + 1
        agent = self._expected[rank] = RemoteAgent(host, process)
        assert process.stdin
        with contextlib.suppress(ConnectionError):  # the process has already ended, and its output says why
            process.stdin.write(msgspec.structs.replace(self._ticket, holder=Launched(rank=rank)).text)
        return agent


class RemoteShell(Engine):
    """Engine that starts an agent by a remote shell, such as ssh; on this machine itself, without one.

    The shell gets its options, a host, and a command for the shell there.
    """

    def __init__(self, words: str = "ssh", interface: str = "") -> None:
        super().__init__(interface)
        try:
            self._words = shlex.split(words)
        except ValueError as error:
            raise UsageError(f"--remote-shell {words}: {error}; write its words as for a shell") from error
        if not self._words or shutil.which(self._words[0]) is None:
            raise UsageError(
                f"--remote-shell {words!r}: no such program here; install one (apt-get install openssh-client), or "
                "name another"
            )
        if os.path.basename(self._words[0]) == "ssh":
            self._words += SSH

    def start(self, host: str) -> RemoteAgent:
        here = host in (*LOCAL, socket.gethostname())
        return self._spawn(host, ["sh", "-c", agent_command()] if here else [*self._words, host, agent_command()])


def agent_command(ticket: str = "-") -> str:
    """Return the command that starts an agent in a host's shell, with this Python and in this directory."""
    paths = [os.path.abspath(path) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    words = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable, "-m", "distbelief", "agent", ticket]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


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
