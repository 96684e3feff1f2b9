"""The lines between the ranks of a process group: schedules point to point, or the library's own way.

What a rank receives is added as it comes, in parts, while the rest is on its way. A group whose member dies raises on
the others; one that is to be halted for another reason is left, and what is still received is thrown away.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from distbelief.core.messages import ALL_REDUCE, Traffic
from distbelief.schedules.schedule import RankStep

PART = 2 << 20
"""Bytes of a move that are sent and added at a time."""


class _Receipt(NamedTuple):
    here: torch.Tensor
    there: torch.Tensor
    adds: bool
    work: int
    """The number of its work."""


class _Posted(NamedTuple):
    works: list[dist.Work]
    each: bool
    """True where every part has a work of its own; NCCL has one for all of them."""
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
        self.traffic = Traffic()
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
            for destination, landing in zip(here.split(part), there.split(part), strict=True):
                receipts.append(_Receipt(destination, landing, got.adds, len(operations)))
                operations.append(dist.P2POp(dist.irecv, landing, group=group, group_peer=got.source))
        for sent in step.sends:
            whole = vector[sent.start : sent.stop]
            pieces = (whole.clone() if swaps else whole).split(part)
            operations += [dist.P2POp(dist.isend, piece, group=group, group_peer=sent.target) for piece in pieces]
        works = dist.batch_isend_irecv(operations)
        self.traffic.sent[ALL_REDUCE] += vector.itemsize * sum(sent.length for sent in step.sends)
        self.traffic.received[ALL_REDUCE] += vector.itemsize * sum(got.length for got in step.receives)
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
        # gloo and NCCL send as much as a ring does
        moved = 2 * (self.ranks - 1) * tensor.nbytes // self.ranks
        self.traffic.sent[ALL_REDUCE] += moved
        self.traffic.received[ALL_REDUCE] += moved

    # what is asked to choose a schedule

    def swap(self, tensor: torch.Tensor, ahead: int, behind: int) -> None:
        """Send a tensor to one rank, and receive as much from another."""
        come = dist.P2POp(dist.irecv, torch.empty_like(tensor), group=self._group, group_peer=behind)
        go = dist.P2POp(dist.isend, tensor, group=self._group, group_peer=ahead)
        for work in dist.batch_isend_irecv([come, go]):
            work.wait()
        self.traffic.sent[ALL_REDUCE] += tensor.nbytes
        self.traffic.received[ALL_REDUCE] += tensor.nbytes

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest that any rank has of each value."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values


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
