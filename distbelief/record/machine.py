"""Description of this machine, and how busy it is: for figures that are measured on it."""

from __future__ import annotations

import datetime
import os
import platform
import time
from pathlib import Path

import torch

from distbelief.record import limits

LOOK = 0.1
"""Seconds for which it is looked how busy the machine is."""


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cores": limits.cores(),
        "processor": model[0] if model else platform.processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def busy() -> float:
    """The part of all cores that somebody uses, while this thread only looks."""
    before = _ticks()
    time.sleep(LOOK)
    whole, idle = (now - then for now, then in zip(_ticks(), before, strict=True))
    return round(1 - idle / whole, 3) if whole else 0.0


def _ticks() -> tuple[int, int]:
    """Ticks of all cores since the machine began, and those of them that were idle; 0 where nobody tells."""
    ticks = [int(word) for line in _lines("/proc/stat")[:1] for word in line.split()[1:9]]
    return sum(ticks), sum(ticks[3:5])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
