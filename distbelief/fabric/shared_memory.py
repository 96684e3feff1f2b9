"""Reductions inside one host: gradients lie in one segment that all replicas map, and are added up there.

The segment holds the counts, a slot for each replica's gradient, and the sum. A count has one writer and only grows;
what it speaks of is written before it, which processors of the x86-64 kind let others see in that order. Nothing is
sent, and nobody is woken: who waits looks, and gives the core away between two looks.

- *direct* (also by the names native and auto) is lowered to one step: each replica adds up its part of every bucket,
  block by block, as soon as all have written theirs, and all find the sum in one place.
- any other schedule is played in the slots, step by step: who receives reads from the sender's slot.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.messages import ALL_REDUCE, Traffic
from distbelief.errors import UsageError
from distbelief.fabric.base import Told, schedule_of
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.player import WHOLE, SchedulePlayer
from distbelief.fabric.waiting import Wait
from distbelief.schedules.allreduce import PLACED, cut
from distbelief.schedules.schedule import Move, RankStep, Schedule
from distbelief.sharding.layout import Range

BLOCK = 1 << 18
"""Bytes that are added up at a time: what is read and written stays in the caches of one core."""
STEPS = 16
"""Bits of a count in which it counts the steps of a schedule; the others count rounds and groups."""
END = RankStep(1 << (STEPS - 2), (), ())
"""The step after the last: all that this rank reads is read, and it waits until all others are there too."""
DIRECT = ("direct", *PLACED)


class _Plan(NamedTuple):
    ready: list[tuple[int, int]]
    """Counts, and how far they must be before what is received may be read; without the round's."""
    read: list[tuple[int, int]]
    """Those of the ranks that must have read before this rank may write over it."""
    here: list[torch.Tensor]
    """The places where what is received is written,"""
    there: list[torch.Tensor]
    """those where it is read,"""
    adds: list[bool]
    """and whether it is added."""


class SharedMemory:
    """One replica's part in the segment of a job.

    Args:
        descriptor: of the segment, which this closes not; every replica makes it as long as it needs.
        index: of this replica.
        replicas: most that there may be.
        algorithm: how gradients are added up.
        per_host: ranks that `hierarchical` counts as one host.

    Raises:
        UsageError: the processor lets others see what is written in another order.
    """

    def __init__(
        self, descriptor: int, index: int, replicas: int, algorithm: str = "native", per_host: int = 0
    ) -> None:
        if not in_order():
            reason = f"gradients in shared memory need an x86-64 processor, this is {platform.machine()}"
            raise UsageError(f"{reason}: use --transport tcp")
        self._descriptor, self._index, self._replicas = descriptor, index, replicas
        self._algorithm, self._per_host = algorithm, per_host
        self._direct = algorithm in DIRECT
        self._start = 0
        self._wait = Wait()
        self.traffic = Traffic()
        self._buckets: list[Bucket] = []
        self._counts = memoryview(b"").cast("q")
        self._slots: list[torch.Tensor] = []
        self._sum = torch.zeros(0, dtype=torch.uint8)
        self._members: list[int] = []
        self._rank = 0
        self._all: list[tuple[int, ...]] = []
        self._blocks: list[list[tuple[torch.Tensor, list[torch.Tensor]]]] = []
        self._plans: list[dict[int, _Plan]] = []
        self._steps: list[tuple[RankStep, ...]] = []
        self._begun: list[SchedulePlayer[int]] = []
        self._copied: dict[int, list[torch.Tensor]] = {}

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot of this replica, and where the sum will be."""
        self._buckets = list(buckets)
        number, page = len(buckets), mmap.PAGESIZE
        counts, stride = -(-self._replicas * number * 8 // page) * page, max(-(-size // page) * page, page)
        length = counts + stride * (self._replicas + 1)
        if os.fstat(self._descriptor).st_size < length:
            os.ftruncate(self._descriptor, length)
        mapping = mmap.mmap(self._descriptor, length)
        self._counts = memoryview(mapping)[:counts].cast("q")
        slots = [
            torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=counts + stride * i)
            for i in range(self._replicas + 1)
        ]
        self._slots, self._sum = slots[:-1], slots[-1]
        return slots[self._index], self._sum if self._direct else slots[self._index]

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Take one's place in a group, for which nobody is waited."""
        self.meet(group.group, [roles.index_of(member.role) for member in group.members])
        return True

    def meet(self, group: int, members: Sequence[int]) -> None:
        """Be one of the replicas of a group, which has a higher number than those before; all must have left these."""
        self._members, self._rank = list(members), list(members).index(self._index)
        # of a later group every count is larger than of those before
        self._start = (group + 1) << (28 + STEPS)
        self._all = [tuple(self._count(rank, b) for rank in range(len(members))) for b in range(len(self._buckets))]
        self._blocks = [self._blocks_of(bucket) if self._direct else [] for bucket in self._buckets]
        self._plans, self._steps = [], []
        for number, bucket in enumerate(self._buckets):
            schedule = None if self._direct else schedule_of(bucket, self._algorithm, len(members), self._per_host)
            self._plans.append(self._plan(number, schedule) if schedule else {})
            self._steps.append((*(schedule.steps_of(self._rank) if schedule else WHOLE), END))
        self._begin_round()

    def _begin_round(self) -> None:
        self._start += 1 << STEPS
        self._begun, self._copied = [], {}

    def ready(self, bucket: int) -> None:
        """Note that a bucket holds what this rank brings; add up at once what others have made ready too."""
        player = SchedulePlayer(self, bucket, self._steps[bucket])
        done = player.begin()
        if self._begun:
            self._advance()
        if not done:
            self._begun.append(player)

    def reduce(self) -> bool | None:
        """Go on with a round of which all buckets are ready."""
        while self._begun:
            if self._advance():
                self._wait.end()
            elif self._wait.rest():
                return None
        self._wait.end()
        self._begin_round()
        return True

    def _advance(self) -> bool:
        """Take all steps that can be taken; whether there were any."""
        took = False
        for player in tuple(self._begun):
            before = player.done
            if player.advance():
                self._begun.remove(player)
            took = took or player.done > before
        return took

    # what the player asks for

    def post(self, vector: int, step: RankStep) -> None:
        """Say that this rank is at a step: what leaves at it may be read, and all that it received before is read."""
        self._counts[self._all[vector][self._rank]] = self._start + 2 * step.number

    def take(self, vector: int, step: RankStep) -> bool:
        """Add up, or read what is received at a step, where all whom it concerns are so far."""
        if not self._direct and step is not END:
            return self._move(vector, step)
        counts, least = self._counts, self._start + 2 * step.number
        for count in self._all[vector]:
            if counts[count] < least:
                return False
        if step is not END:
            self._add_up(vector)
        return True

    # directly

    def _blocks_of(self, bucket: Bucket) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The blocks of this replica's part of a bucket: where the sum goes, and what is added."""
        if not bucket.adds:
            brought = self._slots[self._index][bucket.start : bucket.stop]
            return [] if self._rank else [(self._sum[bucket.start : bucket.stop], [brought])]
        part = cut(Range(0, bucket.length), len(self._members))[self._rank]
        step, blocks = BLOCK // bucket.item, []
        for first in range(part.start, part.stop, step):
            last = min(first + step, part.stop)
            slots = (self._slots[i] for i in self._members)
            views = [_elements(vector, bucket, first, last) for vector in (self._sum, *slots)]
            blocks.append((views[0], views[1:]))
        return blocks

    def _add_up(self, number: int) -> None:
        added = 0
        for there, parts in self._blocks[number]:
            added += there.nbytes
            if len(parts) == 1:
                there.copy_(parts[0])
                continue
            torch.add(parts[0], parts[1], out=there)
            for part in parts[2:]:
                there.add_(part)
        bucket, others = self._buckets[number], len(self._members) - 1
        # of its part what the others bring, of the rest the sum that they have made
        read = others * added * bucket.adds + bucket.stop - bucket.start - added
        self.traffic.shared_memory[ALL_REDUCE] += read

    # by a schedule

    def _count(self, rank: int, bucket: int) -> int:
        """Return where a rank counts: twice the step at which it is in a bucket, one more when that is read."""
        return self._members[rank] * len(self._buckets) + bucket

    def _plan(self, number: int, schedule: Schedule) -> dict[int, _Plan]:
        """Return each step of this rank in the segment, by its number."""

        def of(rank: int, move: Move) -> torch.Tensor:
            return _elements(self._slots[self._members[rank]], self._buckets[number], move.start, move.stop)

        before: list[tuple[int, Move]] = []
        plans = {}
        for step in schedule.steps_of(self._rank):
            before += [(step.number, sent) for sent in step.sends]
            over = [(at, sent) for at, sent in before if any(sent.overlaps(received) for received in step.receives)]
            plans[step.number] = _Plan(
                [(self._count(move.source, number), 2 * step.number) for move in step.receives],
                [(self._count(sent.target, number), 2 * at + 1) for at, sent in over],
                [of(self._rank, move) for move in step.receives],
                [of(move.source, move) for move in step.receives],
                [move.adds for move in step.receives],
            )
        return plans

    def _move(self, vector: int, step: RankStep) -> bool:
        plan, copied = self._plans[vector][step.number], self._copied.get(vector)
        if copied is None:
            if not self._reached(plan.ready):
                return False
            if step.swaps:
                copied = self._copied[vector] = [there.clone() for there in plan.there]
                self._counts[self._all[vector][self._rank]] = self._start + 2 * step.number + 1
        if not self._reached(plan.read):
            return False
        self._copied.pop(vector, None)
        for here, there, adds in zip(plan.here, copied or plan.there, plan.adds, strict=True):
            here.add_(there) if adds else here.copy_(there)
            self.traffic.shared_memory[ALL_REDUCE] += here.nbytes
        return True

    def _reached(self, wanted: list[tuple[int, int]]) -> bool:
        counts, start = self._counts, self._start
        return all(counts[count] >= start + least for count, least in wanted)


def in_order() -> bool:
    """Return whether others see what a processor of this machine writes in the order in which it writes."""
    return platform.machine() in ("x86_64", "AMD64")


def _elements(vector: torch.Tensor, bucket: Bucket, first: int, last: int) -> torch.Tensor:
    start = bucket.start + first * bucket.item
    return vector[start : bucket.start + last * bucket.item].view(getattr(torch, bucket.dtype))
