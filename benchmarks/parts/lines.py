"""Hosts on one machine: network namespaces on a bridge, each with a line of limited rate; they are taken away however
the benchmark ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from distbelief.errors import UsageError

CLONE_NEWNET = 0x40000000
IP_SECONDS = 20.0
SLOW = 100
"""Mbit/s of a line for which the next two are made."""
BURST = 4
"""kB that a line lets pass at once: what it has not used while nothing was sent, up to so much, costs nothing then."""
PACKETS = 6000
"""Bytes that a host hands to its line at a time, which who is behind them waits for: an acknowledgement."""
BURST_SECONDS = 1.3e-3
"""For how long a faster line lets pass what comes: timers are too coarse for less, and it would not be so fast."""
INTERFACE = "line"
"""By which a namespace reaches the others."""


class Namespaces:
    """So many namespaces, each with the interface `line` on one bridge."""

    def __init__(self, count: int, rate: int) -> None:
        self.names = [f"dbb{os.getpid()}x{number}" for number in range(count)]
        self._bridge, self._rate = f"dbb{os.getpid()}", rate

    def build(self) -> None:
        """Make them.

        Raises:
            UsageError: this machine or user may not.
        """
        packets = ["gso_max_size", str(PACKETS)] if self._rate <= SLOW else []
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("link", "set", self._bridge, "up")
            for number, name in enumerate(self.names):
                outer = f"{self._bridge}p{number}"
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip("link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
                ip("link", "set", outer, "master", self._bridge, "up")
                ip("-n", name, "addr", "add", f"10.214.0.{number + 1}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, *packets, "up")
                _limit(["tc"], outer, self._rate)
                _limit(["tc", "-n", name], INTERFACE, self._rate)
        except OSError as error:
            self.clear()
            raise UsageError(
                f"--namespaces {len(self.names)}: they cannot be made here ({error}); they need Linux, root, iproute2 "
                "and tbf"
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
    burst = BURST if rate <= SLOW else int(rate * BURST_SECONDS * 1000 / 8)
    _run([*tc, *f"qdisc add dev {device} root tbf rate {rate}mbit burst {burst}kb latency 400ms".split()])


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
def hosts(count: int, rate: int) -> Iterator[Namespaces]:
    """So many hosts on a bridge, for as long as they are needed."""
    made = Namespaces(count, rate)
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
    return INTERFACE


def own_address() -> str:
    """At which the others reach this process, which is in a namespace."""
    told = subprocess.run(
        ["ip", "-4", "-o", "addr", "show", "dev", INTERFACE],
        capture_output=True,
        text=True,
        timeout=IP_SECONDS,
        check=True,
    )
    return told.stdout.split()[3].partition("/")[0]


def first(process: int = 0) -> None:
    """Let a process (this one), and what it starts, go before all others: it is to wait for its line, not for who else
    uses the processor.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(process, os.SCHED_FIFO, os.sched_param(1))
