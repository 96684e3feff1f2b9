"""All-reduce inside one host: gradients lie in one segment that all replicas map, and are added up there, by all of them at once.

The segment holds the flags, a slot for each replica's gradient, and the sum. A flag is a count that only its owner writes and that only grows; what
it speaks of is written before it, which processors of the x86-64 kind let others see in that order. Nothing is sent, and nobody is woken: who waits
looks, and gives the core away between two looks.

- *direct* (also by the names native and auto): each replica adds up its part of every bucket, block by block, as soon as all have written theirs, and
  all find the sum in one place.
- any other schedule is played in the slots: who receives reads from the sender's slot.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence

import torch

from distbelief.core import roles
from distbelief.core.buckets import Bucket
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.layout import Range
from distbelief.errors import UsageError
from distbelief.schedules.allreduce import PLACED, broadcast, by_host, cut, schedule
from distbelief.schedules.schedule import Move, RankStep
from distbelief.transport.patience import SPIN_SECONDS, rest

BLOCK = 1 << 18
"""Bytes that are added up at a time: what is read and written stays in the caches of one core."""
STEPS = 16
"""Bits of a flag in which it counts the steps of a schedule; the others count rounds and groups."""
LAST = 1 << (STEPS - 1)
DIRECT = ("direct", *PLACED)

Told = Callable[[], bool]


class Memory:
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

    def __init__(self, descriptor: int, index: int, replicas: int, algorithm: str = "native", per_host: int = 0) -> None:
        if not in_order():
            raise UsageError(f"gradients in shared memory need an x86-64 processor, this is {platform.machine()}: use --transport tcp")
        self._descriptor, self._index, self._replicas = descriptor, index, replicas
        self._algorithm, self._per_host = algorithm, per_host
        self._direct = algorithm in DIRECT
        self._sequence = 0

    def open(self, size: int, found: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot of this replica, and where the sum will be."""
        self._buckets = list(found)
        count, page = len(found), mmap.PAGESIZE
        flags, stride = -(-self._replicas * count * 16 // page) * page, max(-(-size // page) * page, page)
        length = flags + stride * (self._replicas + 1)
        if os.fstat(self._descriptor).st_size < length:
            os.ftruncate(self._descriptor, length)
        mapping = mmap.mmap(self._descriptor, length)
        self._flags = memoryview(mapping)[:flags].cast("q")
        slots = [torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=flags + stride * i) for i in range(self._replicas + 1)]
        self._slots, self._sum = slots[:-1], slots[-1]
        self._ready = [[2 * (i * count + b) for b in range(count)] for i in range(self._replicas)]
        return slots[self._index], self._sum if self._direct else slots[self._index]

    def form(self, group: Assemble, told: Told) -> bool:
        """Take one's place in a group, for which nobody is waited."""
        self.meet(group.group, [roles.index_of(member.role) for member in group.members])
        return True

    def meet(self, group: int, members: Sequence[int]) -> None:
        """Be one of the replicas of a group, which has a higher number than those before; all must have left these."""
        self._members, self._rank = list(members), list(members).index(self._index)
        # of a later group every count is larger than of those before
        self._sequence = (group + 1) << 28
        self._own = [self._shares(bucket) if self._direct else [] for bucket in self._buckets]
        self._plays = [[] if self._direct else self._play_of(bucket) for bucket in self._buckets]
        self._next_round()

    def _next_round(self) -> None:
        self._sequence += 1
        self._pending = list(range(len(self._buckets)))

    def ready(self, bucket: int) -> None:
        """The gradient of a bucket is written; what others have made ready too is added up at once."""
        self._flags[self._ready[self._index][bucket]] = self._sequence
        if self._direct:
            self._add_up()

    def reduce(self, round: int, told: Told) -> bool:
        """Add up what is left; False as soon as `told` says that something has arrived."""
        if not self._direct:
            done = all(self._play(number, told) for number in range(len(self._buckets)))
        else:
            while self._pending:
                at = self._pending[0]
                if not all(self._wait(self._ready[i][at], self._sequence, told) for i in self._members):
                    return False
                self._add_up()
            done = True
        # nobody writes to what another may still be reading
        last = self._sequence if self._direct else (self._sequence << STEPS) + LAST
        for number in range(len(self._buckets)):
            done = done and all(self._wait(self._ready[i][number] + 1, last, told) for i in self._members)
        if done:
            self._next_round()
        return done

    # directly

    def _shares(self, bucket: Bucket) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The blocks of this replica's part of a bucket: where the sum goes, and what is added."""
        if not bucket.adds:
            own = self._slots[self._index][bucket.start : bucket.stop]
            return [] if self._rank else [(self._sum[bucket.start : bucket.stop], [own])]
        part = cut(Range(0, bucket.length), len(self._members))[self._rank]
        step, blocks = BLOCK // bucket.item, []
        for first in range(part.start, part.stop, step):
            last = min(first + step, part.stop)
            views = [_elements(vector, bucket, first, last) for vector in (self._sum, *(self._slots[i] for i in self._members))]
            blocks.append((views[0], views[1:]))
        return blocks

    def _add_up(self) -> None:
        """Add up this replica's part of every bucket that is ready in all slots."""
        flags = self._flags
        for number in list(self._pending):
            if all(flags[self._ready[i][number]] >= self._sequence for i in self._members):
                for there, parts in self._own[number]:
                    if len(parts) == 1:
                        there.copy_(parts[0])
                        continue
                    torch.add(parts[0], parts[1], out=there)
                    for part in parts[2:]:
                        there.add_(part)
                flags[self._ready[self._index][number] + 1] = self._sequence
                self._pending.remove(number)

    # by a schedule

    def _play_of(self, bucket: Bucket) -> list[tuple[RankStep, list[tuple[int, int]]]]:
        """The turns of this rank, and for each, who must have read what before this rank may write over it: a member, and at which step."""
        ranks = len(self._members)
        hosts = by_host(ranks, self._per_host) if self._algorithm.startswith("hierarchical") else ()
        made = schedule(self._algorithm, ranks, bucket.length, hosts) if bucket.adds else broadcast(ranks, bucket.length)
        turns, before, found = made.steps_of(self._rank), list[tuple[int, Move]](), []
        for turn in turns:
            before += [(turn.number, sent) for sent in turn.sends]
            over = [(s.target, step) for step, s in before if any(s.start < r.stop and r.start < s.stop for r in turn.receives)]
            found.append((turn, over))
        return found

    def _play(self, number: int, told: Told) -> bool:
        """Go through the turns of one bucket. The second flag of a bucket says how far: twice the step, and one more when all of it is read."""
        bucket, flag, start = self._buckets[number], self._ready[self._index][number], self._sequence << STEPS
        plays = self._plays[number]
        for at, (turn, over) in enumerate(plays):
            self._flags[flag + 1] = start + 2 * turn.number
            taken: list[tuple[torch.Tensor, torch.Tensor]] = []
            for transfer in turn.receives:
                source = self._members[transfer.source]
                if not self._wait(self._ready[source][number], self._sequence, told):
                    return False
                if not self._wait(self._ready[source][number] + 1, start + 2 * turn.number, told):
                    return False
                here, there = (_elements(self._slots[i], bucket, transfer.start, transfer.stop) for i in (self._index, source))
                if turn.swaps:
                    taken.append((here, there.clone()))
                    adds = transfer.adds
                elif self._let_read(number, over, start, told):
                    here.add_(there) if transfer.adds else here.copy_(there)
                else:
                    return False
            if taken:
                self._flags[flag + 1] = start + 2 * turn.number + 1
                if not self._let_read(number, over, start, told):
                    return False
                for here, copied in taken:
                    here.add_(copied) if adds else here.copy_(copied)
            self._flags[flag + 1] = start + 2 * (plays[at + 1][0].number if at + 1 < len(plays) else turn.number + 1)
        self._flags[flag + 1] = start + LAST
        return True

    def _let_read(self, number: int, over: list[tuple[int, int]], start: int, told: Told) -> bool:
        return all(self._wait(self._ready[self._members[rank]][number] + 1, start + 2 * step + 1, told) for rank, step in over)

    # waiting

    def _wait(self, flag: int, count: int, told: Told) -> bool:
        """Wait until a flag has reached a count; False as soon as something has arrived."""
        flags = self._flags
        if flags[flag] >= count:
            return True
        began = time.perf_counter()
        while flags[flag] < count:
            waited = time.perf_counter() - began
            if waited >= SPIN_SECONDS and told():
                return flags[flag] >= count
            rest(waited)
        return True


def in_order() -> bool:
    """Whether the processors of this machine let others see what they write in the order in which they write it."""
    return platform.machine() in ("x86_64", "AMD64")


def _elements(vector: torch.Tensor, bucket: Bucket, first: int, last: int) -> torch.Tensor:
    start = bucket.start + first * bucket.item
    return vector[start : bucket.start + last * bucket.item].view(getattr(torch, bucket.dtype))
