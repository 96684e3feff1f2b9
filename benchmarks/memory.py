"""Flat vectors held by a replica, a shard and all processes of a job, from memory for a large and a small model."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts import workloads
from benchmarks.parts.timing import BenchOptions, Figure, Measured, Table, figure
from distbelief.core import roles
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.lab import number
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour, Strategy
from distbelief.strategies.base import DIRECT, SERVED

VECTOR = 4 * workloads.WIDE * workloads.WIDE
"""Bytes of the large model's parameters."""
ROLES = (roles.replica(0), roles.shard(0))
TOGETHER = "together"
STATES = {"sgd": 0, "adagrad": 1, "momentum": 1, "adam": 2}
"""Vectors of state that each optimizer keeps."""
INTERVAL = 0.01
"""Seconds between looks at the processes."""


@dataclass(frozen=True)
class MemoryOptions(BenchOptions):
    """Options of the benchmark memory."""

    optimizer: str = "adagrad"
    """Optimizer of the shards; its state counts as theirs."""
    epochs: int = 30
    """Steps for which each job is observed."""


def run(options: MemoryOptions) -> Measured:
    """Measure."""
    measured, asked = {}, (options.optimizer, options.epochs)
    for prefetch in (0,) if options.quick else (0, 1):
        for transport in ("shared",) if options.quick else ("shared", "tcp"):
            grown = _grown(*asked, Local(transport, path=SERVED), prefetch=prefetch)
            measured[f"{transport}, prefetch {prefetch}"] = {str(roles.kind(role)): grown[role] for role in ROLES}
    together = {path: _grown(*asked, Local(path=path), replicas=2)[TOGETHER]["usual"] for path in (SERVED, DIRECT)}
    rows = [
        [how, *(number(one[role][kind]) for role in ("replica", "shard") for kind in ("usual", "peak"))]
        for how, one in measured.items()
    ]
    title = f"flat vectors of {VECTOR >> 20} MB held; 1 replica, 1 shard, {options.optimizer}"
    return Measured(
        {"vector_bytes": VECTOR, "optimizer": options.optimizer, "vectors": measured, "together": together},
        _figures(measured, together, options.optimizer),
        [
            Table(title, ("", "replica", "at its peak", "shard", "at its peak"), rows),
            Table("2 replicas and 1 shard", ("path", "all"), [[path, number(one)] for path, one in together.items()]),
        ],
    )


def _figures(measured: Json, together: Mapping[str, float], optimizer: str) -> list[Figure]:
    """Return the target figures; a replica's own vectors are those that it holds besides its parameters."""
    figures = []
    state = STATES.get(optimizer)
    for how, one in measured.items():
        prefetch, replica = int(how[-1]), one["replica"]["peak"] - 1
        figures.append(figure(f"{how}: a replica's vectors beyond its parameters", replica, 3.0 + prefetch, lower=True))
        if state is not None:
            figures.append(figure(f"{how}: a shard's slices", one["shard"]["peak"], 3 + state + prefetch, lower=True))
    if state is not None:
        what = "2 replicas and 1 shard together, on the direct path, relative to the served one"
        figures.append(figure(what, together[DIRECT] / together[SERVED], 1.2 if state else 1.0, lower=True))
    return figures


def _grown(
    optimizer: str, epochs: int, place: Local, replicas: int = 1, prefetch: int = 0
) -> dict[str, dict[str, float]]:
    """Return the flat vectors held by each role of a job, and by all together."""
    strategy = Downpour(replicas=replicas, shards=1, prefetch=prefetch, optimizer=optim(optimizer))
    large, small = (
        _held(f"benchmarks.parts.workloads:{model}", strategy, place, epochs) for model in ("wide", "narrow")
    )
    return {who: {kind: (large[who][kind] - small[who][kind]) / VECTOR for kind in large[who]} for who in large}


def _held(task: str, strategy: Strategy, place: Local, epochs: int) -> dict[str, dict[str, float]]:
    """Return the bytes held by each role of a job: the median over all observations, and the most."""
    looks: dict[str, list[int]] = {}
    ended = threading.Event()
    watcher = threading.Thread(target=_look, args=(os.getpid(), looks, ended), daemon=True)
    watcher.start()
    try:
        workloads.run(task, strategy, place, epochs=epochs)
    finally:
        ended.set()
        watcher.join()
    # the median is of training, which takes most of the time; before and after it less is held
    return {
        who: {"usual": float(sorted(held)[len(held) // 2]), "peak": float(max(held))} for who, held in looks.items()
    }


def _look(ancestor: int, looks: dict[str, list[int]], ended: threading.Event) -> None:
    """Repeatedly note the bytes held by each process of a job, and by all together."""
    while not ended.wait(INTERVAL):
        played = _roles(ancestor)
        for role in ROLES:
            # a shard only borrows the segment that a replica lends
            own = ("RssAnon", "RssShmem") if roles.is_replica(role) else ("RssAnon",)
            if role in played and (held := _bytes(played[role], "status", *own)):
                looks.setdefault(role, []).append(held)
        if played:
            looks.setdefault(TOGETHER, []).append(sum(_bytes(pid, "smaps_rollup", "Pss") for pid in played.values()))


def _roles(ancestor: int) -> dict[str, int]:
    """Return the descendants of a process whose titles name a role."""
    parents, titles = {}, {}
    for path in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(path.name)] = (path / "cmdline").read_bytes().rstrip(b"\0 ").decode()
        except (OSError, ValueError):
            continue

    def below(pid: int) -> bool:  # ids are not in order: they start again from the lowest
        while pid and pid != ancestor:
            pid = parents.get(pid, 0)
        return pid == ancestor

    played = {roles.title_of(role): role for role in (*ROLES, roles.replica(1))}
    return {played[title]: pid for pid, title in titles.items() if title in played and below(pid)}


def _bytes(pid: int, file: str, *kinds: str) -> int:
    """Return the bytes of some kinds that a process holds; 0 after its end."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        amounts = dict(line.split(":", 1) for line in lines if ":" in line)
        return sum(int(amounts[kind].split()[0]) << 10 for kind in kinds)
    except (OSError, KeyError, ValueError):
        return 0
