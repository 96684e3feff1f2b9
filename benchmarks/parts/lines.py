"""Hosts on one machine: network namespaces on a bridge, each with a line of limited rate, for a benchmark's time."""

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
"""Rate in Mbit/s for which the next two limits are chosen."""
BURST = 4
"""Burst of a line in kB, which may pass at once after unused time."""
PACKETS = 6000
"""Bytes that a host sends at a time; an acknowledgement queued behind them must wait."""
BURST_SECONDS = 1.3e-3
"""Burst of a faster line in seconds, since timers are too coarse for less."""
INTERFACE = "line"
"""Network interface through which a namespace reaches the others."""


def address(number: int) -> str:
    """Return the address of a host, by its index."""
    return f"10.214.0.{number + 1}"


@contextlib.contextmanager
def hosts(count: int, rate: int) -> Iterator[list[str]]:
    """Make network namespaces with the interface `line` on one bridge, or raise a `UsageError`."""
    bridge = f"dbb{os.getpid()}"
    names = [f"{bridge}x{number}" for number in range(count)]
    try:
        try:
            _build(bridge, names, rate)
        except OSError as error:
            raise UsageError(
                f"--namespaces {count}: they cannot be made here ({error}); they need Linux, root, iproute2 and tbf"
            ) from error
        yield names
    finally:
        for number, name in enumerate(names):
            _clear("netns", "delete", name)
            _clear("link", "delete", f"{bridge}p{number}")
        _clear("link", "delete", bridge)


def _build(bridge: str, names: list[str], rate: int) -> None:
    packets = ["gso_max_size", str(PACKETS)] if rate <= SLOW else []
    ip("link", "add", bridge, "type", "bridge")
    ip("link", "set", bridge, "up")
    for number, name in enumerate(names):
        outer = f"{bridge}p{number}"
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        ip("link", "set", outer, "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", INTERFACE)
        ip("-n", name, "link", "set", INTERFACE, *packets, "up")
        _limit(["tc"], outer, rate)
        _limit(["tc", "-n", name], INTERFACE, rate)


def _clear(*words: str) -> None:
    with contextlib.suppress(OSError):
        ip(*words)


def _limit(tc: list[str], device: str, rate: int) -> None:
    burst = BURST if rate <= SLOW else int(rate * BURST_SECONDS * 1000 / 8)
    _run([*tc, *f"qdisc add dev {device} root tbf rate {rate}mbit burst {burst}kb latency 400ms".split()])


def ip(*words: str) -> None:
    """Run `ip`, or raise an `OSError`."""
    _run(["ip", *words])


def _run(words: list[str]) -> None:
    made = subprocess.run(words, capture_output=True, text=True, timeout=IP_SECONDS, check=False)
    if made.returncode:
        raise OSError(f"{' '.join(words)}: {made.stderr.strip()}")


def enter(name: str) -> str:
    """Move this process into a namespace; return the interface by which it reaches the others."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise UsageError(f"cannot enter network namespace {name}: {os.strerror(ctypes.get_errno())}; run as root")
    finally:
        os.close(descriptor)
    return INTERFACE


def first(process: int = 0) -> None:
    """Give a process and its children the highest priority, so that it waits for its line and not for a core."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(process, os.SCHED_FIFO, os.sched_param(1))
