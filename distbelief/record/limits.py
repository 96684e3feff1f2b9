"""Cores and memory that processes may use: the machine's, or their container's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
"""Folder of the kernel's own figures."""


def quota() -> int:
    """Return the cores that quotas of processor time leave, at least 1; all of the machine's without quotas."""
    cores = float(os.cpu_count() or 1)
    for group in _groups("cpu"):
        whole = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        used, _, period = whole.partition(" ")
        if used.isdecimal() and period.isdecimal() and int(period):  # neither "max" nor -1
            cores = min(cores, int(used) / int(period))
    return max(1, int(cores))


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its quota."""
    return min(len(os.sched_getaffinity(0)), quota())


def free_memory() -> int:
    """Return the bytes that processes may still allocate: the machine's, within the limits of their container."""
    free = _counts(PROC / "meminfo")["MemAvailable"] << 10
    for group in _groups("memory"):
        for most, held in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (limit := _read(group / most)).isdecimal():
                kept = _counts(group / "memory.stat")
                cached = kept.get("total_inactive_file", kept.get("inactive_file", 0))  # given back when asked for
                free = min(free, max(0, int(limit) - int(_read(group / held) or 0) + cached))
    return free


def memory_kills() -> int:
    """Return how many processes of this one's group the kernel has killed for lack of memory.

    It is the machine's count where groups have none.
    """
    for group in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, and 1
            if "oom_kill" in (counts := _counts(group / name)):
                return counts["oom_kill"]
    return _counts(PROC / "vmstat").get("oom_kill", 0)


def _groups(controller: str) -> Iterator[Path]:
    """Groups that limit this process, its own first, of both versions: each mount shows those below some group."""
    paths = {}
    for line in _read(PROC / "self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))  # of version 2 the name is empty
    for line in _read(PROC / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        top, root = before.split()[3:5]
        kind, _, options = after.split(None, 2)
        name = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if name not in paths or (name and name not in options.split(",")):
            continue
        cgroup = Path(paths[name])
        below = cgroup.relative_to(top) if cgroup.is_relative_to(top) else Path()
        for group in (below, *below.parents):
            yield Path(root, group)


def _counts(path: Path) -> dict[str, int]:
    """The numbers of a file, by the names before them."""
    words = [line.replace(":", " ").split() for line in _read(path).splitlines()]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _read(path: Path) -> str:
    """Read a file of the kernel; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
