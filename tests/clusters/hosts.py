"""Hosts on one machine: each has a network, a name, processes, /run and /dev/shm of its own, and an sshd.

All share the disk, as hosts with a network file system do. When the process that made them ends, however that ends,
so do they. Of this machine nothing is changed but that a disk of their own is mounted on it, which `close` takes away:
where the process that made them is killed, it stays, under the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic

NET, BRIDGE = "10.214.0", "bridge"
HOME = "home"
"""The host on which a job is started that is none of its hosts."""
SECONDS = 30.0
"""How long a tool may take."""
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "sshd": "openssh-server"}
"""What is needed, and the package that has it."""
MARKS = ("faketime",)
"""What other tools leave in a host's shared memory."""


def missing(tools: Mapping[str, str]) -> str:
    """Why hosts cannot be had with these tools; "" where they can."""
    if os.geteuid():
        return "needs root, to make namespaces"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
    lacks = [f"{tool} ({package})" for tool, package in tools.items() if not shutil.which(tool, path=path)]
    return f"needs {', '.join(lacks)}" if lacks else ""


def run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a tool; returns what it prints.

    Raises:
        OSError: it fails.
    """
    made = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    if made.returncode:
        raise OSError(f"{shlex.join(words)}: {made.stderr.strip()}")
    return made.stdout


def called(pid: int) -> str:
    """The command line of a process that is there; "" of one that is not, or has ended and is not yet waited for."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return ""
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_of(words: str, programs: tuple[str, ...]) -> bool:
    """Whether a command line is of one of some programs, or of an interpreter that runs it."""
    return any(Path(word).name.startswith(programs) for word in words.split(" ")[:2])


class Host:
    """One host: the namespaces of a process that ends when nobody holds its standard input any more.

    Args:
        name: of the host.
        folder: with the files that all hosts have.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        prepare = f"""hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mkdir /run/sshd \
            && mount --bind {folder}/hosts /etc/hosts && mount --bind {folder}/ssh_config /etc/ssh/ssh_config \
            && ip link set lo up && echo ready && exec cat"""
        own = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._holder = subprocess.Popen(
            ["unshare", *own, "sh", "-c", prepare], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout
        assert self._holder.stderr
        if self._holder.stdout.readline() != b"ready\n":
            raise OSError(f"host {name}: {self._holder.stderr.read().decode().strip()}")
        self.init = int(Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()[0])
        self._network = os.stat(f"/proc/{self.init}/ns/net").st_ino
        self._daemons: set[int] = set()

    def command(self, words: Iterable[str], folder: str = "/", seen: bool = False) -> list[str]:
        """What runs a command there; with this machine's processes in sight, or its own."""
        own = [] if seen else ["--mount", "--pid"]
        inside = ["nsenter", "--target", str(self.init), "--net", "--uts", *own]
        return [*inside, "sh", "-c", 'cd "$0" && exec "$@"', folder, *words]

    def run(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a command there to its end; returns what it prints."""
        return run(*self.command(words), environment=environment)

    def ip(self, *words: str) -> str:
        """Run `ip` in its network, which knows processes by their ids here."""
        return run("nsenter", "--target", str(self.init), "--net", "ip", *words)

    def processes(self, daemons: bool = False) -> dict[int, str]:
        """All that run there, its daemons or not, with their command lines; by their ids here."""
        found = {}
        for one in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(one.name)
                if os.stat(one / "ns/net").st_ino == self._network and pid not in (self.init, self._holder.pid):
                    found[pid] = called(pid)
        return {pid: words for pid, words in found.items() if words and (daemons or pid not in self._daemons)}

    def keep(self) -> None:
        """What runs there now are its daemons."""
        self._daemons |= self.processes().keys()

    def memory(self) -> list[str]:
        """What lies in its shared memory."""
        found = [str(one) for one in Path(f"/proc/{self.init}/root/dev/shm").iterdir()]
        return [one for one in found if not any(mark in one for mark in MARKS)]

    def close(self) -> None:
        """Take it away, with all that runs there."""
        self._holder.kill()
        self._holder.communicate()


class Hosts:
    """So many hosts n0, n1, ... on one bridge, and `home`; `close` takes them away.

    Args:
        count: of hosts, beside home.
        disk: bytes of a disk of their own that all share, `disk`, which is mounted here; 0 for none.
        environment: that a login has there.
    """

    def __init__(self, count: int = 4, disk: int = 0, environment: dict[str, str] | None = None) -> None:
        self.environment = environment or {"PATH": os.environ["PATH"]}
        self.names = [f"n{at}" for at in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="distbelief-hosts-"))
        self.disk = self.folder / "disk"
        self.addresses = {name: f"{NET}.{at}" for at, name in enumerate((*self.names, HOME), 1)}
        self.hosts: dict[str, Host] = {}
        self._has_disk = bool(disk)
        try:
            self._write_files(disk)
            for name in self.addresses:
                self.hosts[name] = Host(name, self.folder)
            self._lay_cables()
            for name in self.names:
                self.start_sshd(name)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def _write_files(self, disk: int) -> None:
        (self.folder / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **self.addresses}.items())
        )
        for name in ("key", "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "ssh_config").write_text(
            f"User root\nIdentityFile {self.folder}/key\nUserKnownHostsFile {self.folder}/known\nStrictHostKeyChecking "
            "no\nLogLevel ERROR\n"
        )
        if disk:
            self.disk.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={disk}", "tmpfs", str(self.disk))

    def _lay_cables(self) -> None:
        home = self[HOME]
        home.ip("link", "add", BRIDGE, "type", "bridge")
        home.ip("addr", "add", f"{self.addresses[HOME]}/24", "dev", BRIDGE)
        home.ip("link", "set", BRIDGE, "up")
        for name in self.names:
            there = self[name]
            home.ip("link", "add", name, "type", "veth", "peer", "name", "eth0")
            home.ip("link", "set", "eth0", "netns", str(there.init))
            home.ip("link", "set", name, "master", BRIDGE, "up")
            there.ip("addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            there.ip("link", "set", "eth0", "up")

    def start_sshd(self, name: str) -> None:
        """Start the sshd of a host."""
        login = " ".join(f"{one}={value}" for one, value in self.environment.items())
        options = {
            "AuthorizedKeysFile": f"{self.folder}/key.pub", "StrictModes": "no", "UsePAM": "no", "AcceptEnv": "*",
            "ClientAliveInterval": "10", "SetEnv": login,
        }  # fmt: skip
        words = [word for option in options.items() for word in ("-o", "=".join(option))]
        self[name].run("/usr/sbin/sshd", "-f", "/dev/null", "-h", str(self.folder / "host_key"), *words)
        self[name].keep()

    def cut(self, name: str, down: bool = True) -> None:
        """Cut the cable of a host, or mend it."""
        self[HOME].ip("link", "set", name, "down" if down else "up")

    def kill(self, pids: Iterable[int], number: int = signal.SIGKILL) -> None:
        """Send processes a signal, by their ids here."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_until_empty(self, seconds: float, but: tuple[str, ...] = ()) -> float:
        """Wait until nothing of a job is left on any host, but what belongs to programs of these names; returns the
        seconds.

        Raises:
            AssertionError: something is, after so long.
        """
        began = monotonic()
        while left := {
            (host.name, pid): words
            for host in self.hosts.values()
            for pid, words in host.processes().items()
            if not is_of(words, but)
        }:
            assert monotonic() < began + seconds, left
            wait_for_end(next(iter(left))[1], min(1.0, began + seconds - monotonic()))
        held = {host.name: held for host in self.hosts.values() if (held := host.memory())}
        assert not held, held
        return monotonic() - began

    def close(self) -> None:
        """Take all away."""
        for host in self.hosts.values():
            host.close()
        if self._has_disk:
            with contextlib.suppress(OSError):
                run("umount", str(self.disk))
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for_end(pid: int, seconds: float) -> bool:
    """Wait until a process has ended, whoever's child it is; whether it has in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])
    finally:
        os.close(descriptor)


if __name__ == "__main__":  # hosts to work with by hand, until a line is read
    several = Hosts(int(sys.argv[1]) if sys.argv[1:] else 4)
    try:
        for each in several.hosts.values():
            print(shlex.join(each.command(["bash"], os.getcwd())), flush=True)
        sys.stdin.readline()
    finally:
        several.close()
