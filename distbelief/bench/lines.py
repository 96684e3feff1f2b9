"""Hosts on one machine: network namespaces on a bridge, each with a line of limited rate; they are taken away however the benchmark ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from distbelief.errors import UsageError

CLONE_NEWNET = 0x40000000
IP_SECONDS = 20.0
BURST = 16
"""kB that a line lets pass at once; a tenth of what is measured at most."""


class Hosts:
    """So many namespaces, each with the interface `line` on one bridge."""

    def __init__(self, count: int, rate: int) -> None:
        self.names = [f"dbb{os.getpid()}x{number}" for number in range(count)]
        self._bridge, self._rate = f"dbb{os.getpid()}", rate

    def build(self) -> None:
        """Make them.

        Raises:
            UsageError: this machine or user may not.
        """
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("link", "set", self._bridge, "up")
            for number, name in enumerate(self.names):
                outer = f"{self._bridge}p{number}"
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip("link", "add", outer, "type", "veth", "peer", "name", "line", "netns", name)
                ip("link", "set", outer, "master", self._bridge, "up")
                ip("-n", name, "addr", "add", f"10.214.0.{number + 1}/24", "dev", "line")
                ip("-n", name, "link", "set", "line", "up")
                _limit(["tc"], outer, self._rate)
                _limit(["tc", "-n", name], "line", self._rate)
        except OSError as error:
            self.clear()
            raise UsageError(
                f"--namespaces {len(self.names)}: they cannot be made here ({error}); they need Linux, root, iproute2 and tbf"
            ) from error

    def clear(self) -> None:
        """Take them away."""
        for number, name in enumerate(self.names):
            for words in (("netns", "delete", name), ("link", "delete", f"{self._bridge}p{number}")):
                with contextlib.suppress(OSError):
                    ip(*words)
        with contextlib.suppress(OSError):
            ip("link", "delete", self._bridge)


def _limit(tc: list[str], device: str, rate: int) -> None:
    _run([*tc, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate}mbit", "burst", f"{BURST}kb", "latency", "400ms"])


def ip(*words: str) -> None:
    """Run `ip`.

    Raises:
        OSError: it is not there, or refuses.
    """
    _run(["ip", *words])


def _run(words: list[str]) -> None:
    made = subprocess.run(words, capture_output=True, text=True, timeout=IP_SECONDS, check=False)
    if made.returncode:
        raise OSError(f"{' '.join(words)}: {made.stderr.strip()}")


@contextlib.contextmanager
def hosts(count: int, rate: int) -> Iterator[Hosts]:
    """So many hosts, for as long as they are needed."""
    made = Hosts(count, rate)
    made.build()
    try:
        yield made
    finally:
        made.clear()


def enter(name: str) -> str:
    """Put this process into a namespace; returns the interface by which it reaches the others.

    Raises:
        UsageError: it may not.
    """
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise UsageError(f"cannot enter network namespace {name}: {os.strerror(ctypes.get_errno())}; run as root")
    finally:
        os.close(descriptor)
    return "line"
