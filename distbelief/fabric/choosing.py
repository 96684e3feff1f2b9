"""Choice of the schedule by which ranks add up a vector: the one that is named, or the cheapest by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from distbelief.schedules.allreduce import by_host, schedule
from distbelief.schedules.price import LinkModel, cheapest
from distbelief.schedules.schedule import Schedule

PROBES = 5
PROBE_BYTES = 1 << 20


class Measurable(Protocol):
    """The lines of one rank, as far as somebody asks what they are like."""

    rank: int
    ranks: int
    device: torch.device

    def swap(self, tensor: torch.Tensor, ahead: int, behind: int) -> None:
        """Send a tensor to one rank, and receive as much from another."""

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest that any rank has of each value."""
        ...


def agree(lines: Measurable, group: Sequence[int]) -> LinkModel:
    """Agree on what the slowest of all ranks measures, each among those of some ranks that it is one of."""
    mine = _probe(lines, group) if len(group) > 1 else LinkModel(0.0, 1e12)
    worst = torch.tensor([mine.latency, 1 / mine.bandwidth, mine.reduction], dtype=torch.float64, device=lines.device)
    latency, per_byte, reduction = lines.maximum(worst).tolist()
    return LinkModel(latency, 1 / per_byte, reduction)


def _probe(lines: Measurable, group: Sequence[int]) -> LinkModel:
    """Measure the line to the next of some ranks, where all of them ask at once, and what adding costs."""
    at = group.index(lines.rank)
    ahead, behind = group[(at + 1) % len(group)], group[at - 1]
    small, large = (torch.zeros(size, dtype=torch.uint8, device=lines.device) for size in (8, PROBE_BYTES))
    floats = large.view(torch.float32)
    acts: tuple[Callable[[], object], ...] = (
        lambda: lines.swap(small, ahead, behind),
        lambda: lines.swap(large, ahead, behind),
        lambda: floats.add_(floats),
    )
    latency, whole, adding = (_least(act, lines.device) for act in acts)
    return LinkModel(latency, PROBE_BYTES / max(whole - latency, 1e-9), adding / PROBE_BYTES)


def _least(act: Callable[[], object], device: torch.device) -> float:
    """The least seconds that something takes, of several times."""
    seconds = []
    for _ in range(PROBES + 1):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


class ScheduleChoice:
    """The schedule by which the ranks of a group add up a vector.

    With auto that is by what they measure as this is made, and agree on.

    Args:
        lines: of this rank.
        algorithm: one of `schedules/allreduce`, native or auto.
        per_host: ranks that follow each other on one host; 0 for all.
    """

    def __init__(self, lines: Measurable, algorithm: str, per_host: int) -> None:
        self._ranks, self._name, self._hosts = lines.ranks, algorithm, by_host(lines.ranks, per_host)
        self._link: LinkModel | None = None
        self._inside: LinkModel | None = None
        if algorithm == "auto" and lines.ranks > 1:
            self._link = agree(lines, range(lines.ranks))
            if len(self._hosts) > 1 and max(map(len, self._hosts)) > 1:
                self._inside = agree(lines, next(host for host in self._hosts if lines.rank in host))

    def of(self, length: int, item: int) -> Schedule | None:
        """For so many elements of so many bytes; None is the library's own way."""
        if self._name == "native" or self._ranks == 1:
            return None
        hosts, best = self._hosts, self._name
        if self._link:
            best = cheapest(hosts, length, item, self._link, self._inside)
        return schedule(best, self._ranks, length, hosts if best.startswith("hierarchical") else ())
