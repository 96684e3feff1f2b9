"""Cores and memory that this machine or its container lets processes use, and a description of the machine."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
"""Folder of the kernel's figures."""


def quota() -> int:
    """Return the cores that quotas of CPU time allow, at least 1; without quotas, all cores of the machine."""
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
    return memory()[0]


def memory() -> tuple[int, int]:
    """Return the bytes that processes may still allocate, and all that they and others may ever."""
    known = _counts(PROC / "meminfo")
    free, whole = known["MemAvailable"] << 10, known.get("MemTotal", 0) << 10
    for group in _groups("memory"):
        for most, held in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (limit := _read(group / most)).isdecimal():
                kept = _counts(group / "memory.stat")
                cached = kept.get("total_inactive_file", kept.get("inactive_file", 0))  # the kernel frees it on demand
                free = min(free, max(0, int(limit) - int(_read(group / held) or 0) + cached))
                whole = min(whole, int(limit))
    return free, whole


def memory_kills() -> int:
    """Return how many processes of this group, or else this machine, the kernel has killed for lack of memory."""
    for group in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # version 2, and version 1
            if "oom_kill" in (counts := _counts(group / name)):
                return counts["oom_kill"]
    return _counts(PROC / "vmstat").get("oom_kill", 0)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the control groups that limit this process, of both versions, the innermost first."""
    paths = {}
    for line in _read(PROC / "self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))  # in version 2 the name is empty
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
    """Return the numbers of a file by their names."""
    words = [line.replace(":", " ").split() for line in _read(path).splitlines()]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _read(path: Path) -> str:
    """Read a file of the kernel, "" if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


LOOK = 0.1
"""Seconds over which the use of cores is measured."""


def machine() -> dict[str, object]:
    """Describe this machine, for figures that are measured on it."""
    import torch  # imported here, since hosts ask for their cores before they need torch

    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cores": cores(),
        "processor": model[0] if model else platform.processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def busy() -> float:
    """Measure the share of all cores that is in use, while this thread sleeps."""
    before = _ticks()
    time.sleep(LOOK)
    whole, idle = (now - then for now, then in zip(_ticks(), before, strict=True))
    return round(1 - idle / whole, 3) if whole else 0.0


def _ticks() -> tuple[int, int]:
    """Return the ticks of all cores since the machine started, and how many were idle; 0 if unknown."""
    ticks = [int(word) for line in _lines("/proc/stat")[:1] for word in line.split()[1:9]]
    return sum(ticks), sum(ticks[3:5])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
