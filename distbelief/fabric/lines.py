"""The lines between the ranks of a process group: schedules point to point, or the library's own way.

What a rank receives is added as it comes, in parts, while the rest is on its way. A group whose member dies raises on
the others; one that is to be halted for another reason is left, and what is still received is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from distbelief.schedules.allreduce import by_host, schedule
from distbelief.schedules.price import CHOICES, LinkModel, cheapest
from distbelief.schedules.schedule import RankStep, Schedule

PART = 2 << 20
"""Bytes of a move that are sent and added at a time."""
PROBES = 5
PROBE_BYTES = 1 << 20


class _Receipt(NamedTuple):
    """A part that is on its way."""

    here: torch.Tensor
    there: torch.Tensor
    adds: bool
    work: int
    """The number of its work."""


class _Posted(NamedTuple):
    """What is on its way for one step."""

    works: list[dist.Work]
    each: bool
    """Whether every part has a work of its own; NCCL has one for all of them."""
    receipts: list[_Receipt]


class Lines:
    """One rank's ends of the lines; it moves one tensor at a time, and waits where it takes: in a thread of its own.

    Args:
        rank: of this process.
        ranks: how many there are.
        device: where the tensors are.
        group: whose ranks these are; the default one where none is given.
        seconds: how long one may wait for what another sends; as long as the group has it where none are given.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        seconds: float | None = None,
    ) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.left = False
        self._group = group
        self._patience = () if seconds is None else (timedelta(seconds=seconds),)
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._posted: _Posted | None = None

    def leave(self) -> None:
        """Move nothing more; what is on its way is given up."""
        self.left, self._group = True, None

    def stay(self) -> None:
        """Go on only with a group that was not left.

        Raises:
            RuntimeError: it was.
        """
        if self.left:
            raise RuntimeError("the group was left before this was added up")

    def post(self, vector: torch.Tensor, step: RankStep) -> None:
        """Send what leaves at a step, and make room for what comes.

        Raises:
            RuntimeError: a peer is gone, or the group was left.
        """
        part, group = max(PART // vector.itemsize, 1), self._group
        self.stay()
        swaps, room, receipts = step.swaps, 0, list[_Receipt]()
        scratch = self._room(vector, sum(got.length for got in step.receives if got.adds or swaps))
        operations: list[dist.P2POp] = []
        # first what comes: gloo tells the sender that there is room for it behind whatever leaves to him before
        for got in step.receives:
            here = there = vector[got.start : got.stop]
            if got.adds or swaps:
                there = scratch[room : room + got.length]
                room += got.length
            for one, other in zip(here.split(part), there.split(part), strict=True):
                receipts.append(_Receipt(one, other, got.adds, len(operations)))
                operations.append(dist.P2POp(dist.irecv, other, group=group, group_peer=got.source))
        for sent in step.sends:
            whole = vector[sent.start : sent.stop]
            pieces = (whole.clone() if swaps else whole).split(part)
            operations += [dist.P2POp(dist.isend, piece, group=group, group_peer=sent.target) for piece in pieces]
        works = dist.batch_isend_irecv(operations)
        self._posted = _Posted(works, len(works) == len(operations), receipts)

    def take(self, vector: torch.Tensor, step: RankStep) -> bool:
        """Wait for what comes, add it or put it there, and wait until what left has gone.

        Raises:
            RuntimeError: a peer is gone, or the group was left.
        """
        posted, self._posted = self._posted, None  # what fails is to hold nothing of the group
        assert posted is not None
        for work in () if posted.each else posted.works:
            work.wait()
        for here, there, adds, number in posted.receipts:
            if posted.each:
                posted.works[number].wait(*self._patience)
            self.stay()
            if adds:
                here.add_(there)
            elif there.data_ptr() != here.data_ptr():
                here.copy_(there)
        # not for what was waited for before: gloo would wait for ever
        for work in posted.works[len(posted.receipts) :] if posted.each else ():
            work.wait(*self._patience)
        return True

    def _room(self, tensor: torch.Tensor, elements: int) -> torch.Tensor:
        known = self._scratch.get(tensor.dtype)
        if known is None or known.numel() < elements:
            known = self._scratch[tensor.dtype] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
        return known

    def add_up(self, tensor: torch.Tensor) -> None:
        """The library's own way."""
        group = self._group
        self.stay()
        dist.all_reduce(tensor, group=group)

    # what the lines are like

    def agree(self, group: Sequence[int]) -> LinkModel:
        """What the slowest of all ranks measures, each among those of some ranks that it is one of."""
        own = self._probe(group) if len(group) > 1 else LinkModel(0.0, 1e12)
        worst = torch.tensor([own.latency, 1 / own.bandwidth, own.reduction], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        latency, per_byte, reduction = worst.tolist()
        return LinkModel(latency, 1 / per_byte, reduction)

    def _probe(self, group: Sequence[int]) -> LinkModel:
        """What the line to the next of some ranks is like, where all of them ask at once, and what adding costs."""
        at = group.index(self.rank)
        ahead, behind = group[(at + 1) % len(group)], group[at - 1]
        small, large = (torch.zeros(size, dtype=torch.uint8, device=self.device) for size in (8, PROBE_BYTES))

        def swap(tensor: torch.Tensor) -> None:
            come = dist.P2POp(dist.irecv, torch.empty_like(tensor), group=self._group, group_peer=behind)
            go = dist.P2POp(dist.isend, tensor, group=self._group, group_peer=ahead)
            for work in dist.batch_isend_irecv([come, go]):
                work.wait()

        floats = large.view(torch.float32)
        acts: tuple[Callable[[], object], ...] = (lambda: swap(small), lambda: swap(large), lambda: floats.add_(floats))
        latency, whole, adding = map(self._least, acts)
        return LinkModel(latency, PROBE_BYTES / max(whole - latency, 1e-9), adding / PROBE_BYTES)

    def _least(self, act: Callable[[], object]) -> float:
        """The least seconds that something takes, of several times."""
        taken = []
        for _ in range(PROBES + 1):
            began = time.perf_counter()
            act()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            taken.append(time.perf_counter() - began)
        return min(taken[1:])


class Native:
    """The library's own way, as a lowering: the whole schedule as one step."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def post(self, vector: torch.Tensor, step: RankStep) -> None:
        """The library sends as it adds up."""

    def take(self, vector: torch.Tensor, step: RankStep) -> bool:
        """Have it add up."""
        self._lines.add_up(vector)
        return True


class Choice:
    """By which schedule the ranks of a group add up a vector.

    With auto that is by what they measure as this is made, and agree on.

    Args:
        lines: of this rank.
        algorithm: one of `schedules/allreduce`, native or auto.
        per_host: ranks that follow each other on one host; 0 for all.
    """

    def __init__(self, lines: Lines, algorithm: str, per_host: int) -> None:
        self._ranks, self._name, self._hosts = lines.ranks, algorithm, by_host(lines.ranks, per_host)
        self._link: LinkModel | None = None
        self._inside: LinkModel | None = None
        if algorithm == "auto" and lines.ranks > 1:
            self._link = lines.agree(range(lines.ranks))
            if len(self._hosts) > 1 and max(map(len, self._hosts)) > 1:
                self._inside = lines.agree(next(host for host in self._hosts if lines.rank in host))

    def of(self, length: int, item: int) -> Schedule | None:
        """For so many elements of so many bytes; None is the library's own way."""
        if self._name == "native" or self._ranks == 1:
            return None
        hosts, best = self._hosts, self._name
        if self._link:
            best = cheapest(self._ranks, length, item, self._link, self._inside, hosts, CHOICES)
        return schedule(best, self._ranks, length, hosts if best.startswith("hierarchical") else ())
