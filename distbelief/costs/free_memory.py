"""How much memory this machine has left."""

from __future__ import annotations

from pathlib import Path


def free_memory() -> int:
    """What processes may still have, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10
