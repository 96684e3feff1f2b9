"""Four hosts on one machine: network namespaces on one bridge, each with a hostname and an sshd of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep

NET, BRIDGE = "10.214.0", "dbbridge"
HOME = f"{NET}.254"
"""This machine's own address among them."""


def ip(*words: str) -> str:
    """Run `ip`."""
    made = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60, check=False)
    if made.returncode:
        raise OSError(f"ip {' '.join(words)}: {made.stderr.strip()}")
    return made.stdout


class Hosts:
    """So many hosts n0, n1, ...; `close` takes them away, with whatever still runs there.

    Args:
        count: of hosts.
    """

    def __init__(self, count: int = 4) -> None:
        self.names = [f"n{at}" for at in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="distbelief-hosts-"))
        self.addresses = {name: f"{NET}.{at + 1}" for at, name in enumerate(self.names)}
        self._begun: list[subprocess.Popen[bytes]] = []

    def build(self) -> None:
        """Lay the bridge and the cables, and start what a host needs."""
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{HOME}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for name, address in self.addresses.items():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", f"{name}.out", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}.out", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        self._start_sshd()

    def _start_sshd(self) -> None:
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        shutil.copy(f"{key}.pub", self.folder / "authorized")
        Path("/run/sshd").mkdir(exist_ok=True)
        blocks = [
            f"Host {name}\n  HostName {address}\n  User root\n  IdentityFile {key}\n"
            f"  UserKnownHostsFile {self.folder}/known\n  StrictHostKeyChecking accept-new\n"
            for name, address in self.addresses.items()
        ]
        (self.folder / "config").write_text("".join(blocks))
        for name in self.names:
            own = self.folder / f"{name}.key"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own], check=True)
            self.run(
                name, "/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", str(own),
                "-o", f"AuthorizedKeysFile={self.folder}/authorized", "-o", "StrictModes=no", "-o", "UsePAM=no",
                "-o", f"PidFile={self.folder}/{name}.pid",
            )  # fmt: skip

    @property
    def ssh(self) -> str:
        """The remote shell that finds the hosts."""
        return f"ssh -F {self.folder}/config"

    def command(self, name: str, *words: str) -> list[str]:
        """A command of a host, with its hostname."""
        inner = f'hostname {name}; exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", inner, "sh", *words]

    def run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a daemon of a host, whose output lies in a file."""
        log = (self.folder / f"{name}.{Path(words[0]).name}.log").open("ab")
        self._begun.append(subprocess.Popen(self.command(name, *words), stdout=log, stderr=log))
        return self._begun[-1]

    def cut(self, name: str, down: bool = True) -> None:
        """Cut the cable of a host, or mend it."""
        ip("link", "set", f"{name}.out", "down" if down else "up")

    def left(self, name: str) -> dict[int, str]:
        """The processes on a host that are ours: anything of Python."""
        pids = [int(pid) for pid in ip("netns", "pids", name).split()]
        found = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                called = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "distbelief" in called or "python" in called:
                    found[pid] = called.strip()
        return found

    def nothing_left(self, seconds: float) -> float:
        """Seconds until no host has a process of ours.

        Raises:
            AssertionError: it takes longer.
        """
        began = monotonic()
        while left := {name: found for name in self.names if (found := self.left(name))}:
            assert monotonic() < began + seconds, left
            sleep(0.05)
        return monotonic() - began

    def close(self) -> None:
        """End all that is there, and take the hosts away."""
        for name in self.names:
            with contextlib.suppress(OSError):
                for pid in ip("netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        for one in self._begun:
            one.kill()
            one.wait()
        for name in self.names:
            with contextlib.suppress(OSError):
                ip("netns", "delete", name)
        with contextlib.suppress(OSError):
            ip("link", "delete", BRIDGE)
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":  # hosts to work with by hand, until a line is read
    hosts = Hosts(int(sys.argv[1]) if sys.argv[1:] else 4)
    try:
        hosts.build()
        print(f"{hosts.ssh}  ({', '.join(hosts.names)})", flush=True)
        sys.stdin.readline()
    finally:
        hosts.close()
