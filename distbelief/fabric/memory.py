"""Shared memory of a host as the carrier of a sum: all ranks write into one segment, and add up there.

    | counts                                 | gradients                        | sum           |
    | rank 0: one for each vector | 1: ...   | of rank 0 | of rank 1 | ...      | of all        |

Each rank has a count of its progress with each vector. In turn t it is 2t once the rank has written its gradient, and
2t + 1 once it has added up its part of all gradients. Nothing is sent and no process is woken: a waiting rank looks at
the counts, and yields the core between two looks.

A count has one writer, and only grows. A rank writes its count after the values that it counts, and reads another's
count before those values:

- a rank adds up once it has seen that all have written; it writes again only once it has seen that all have added;
- a rank reads the sum once it has seen that all have added, and then writes for the next turn. So a rank that
  overwrites the sum in the next turn has seen that all have read it.

This needs processors that make writes visible in order, and never delay a read beyond a later write. x86-64 processors
do both; others are refused.
"""

from __future__ import annotations

import mmap
import os
import select
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.messages import ALL_REDUCE
from distbelief.fabric.base import Carrier, Told
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.order import check_order
from distbelief.fabric.waiting import Wait, rest
from distbelief.schedules.allreduce import cut
from distbelief.sharding.layout import Range

BLOCK = 1 << 18
"""Bytes that are added up at a time: they fit the caches of one core."""
CHUNK = 1 << 20
"""Most bytes of a tensor in a window at a time; fewer if there are many ranks."""
DEPTH = 2
"""Number of chunks that fit a window."""
SIZE = 64 << 20
"""Most bytes of the chunks in a window."""
LINE = 64
"""Bytes of a cache line. Each holds counts of only one rank, so that two cores never write to one line."""
WORD = 8
"""Bytes of a count."""
GROUP_BITS = 32
"""Bits of a count that hold the turn; the group's number is above them."""
PATIENCE_SECONDS = 1800.0
"""Limit for a wait in a window for a live rank: that of gloo's groups."""
KIND, LEFT = range(DEPTH, DEPTH + 2)
"""Words of a rank in a window, after the counts of its chunks: its vector's kind, and whether it has left."""


class SumMemory:
    """Mapped segment of a sum.

    Each of at most `ranks` ranks has `words` counts, and a gradient of `size` bytes. The file of the `descriptor` grows
    to the needed length, and may be closed afterwards.
    """

    def __init__(self, descriptor: int, ranks: int, words: int, size: int) -> None:
        check_order("a sum in shared memory", "use --transport tcp")
        page = mmap.PAGESIZE
        self.line = -(-words * WORD // LINE) * LINE // WORD
        """Distance of two ranks' counts, in words."""
        counts, stride = -(-ranks * self.line * WORD // page) * page, max(-(-size // page) * page, page)
        length = counts + stride * (ranks + 1)
        if os.fstat(descriptor).st_size < length:
            os.ftruncate(descriptor, length)
        mapping = mmap.mmap(descriptor, length)
        self.counts = memoryview(mapping)[:counts].cast("q")
        *self.brought, self.sum = (
            torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=counts + stride * i)
            for i in range(ranks + 1)
        )


class SharedMemory(Carrier):
    """One replica's part in the segment of a job: gradients are written there, and the sum is read in place."""

    def __init__(self, descriptor: int, index: int, replicas: int) -> None:
        super().__init__(torch.device("cpu"))
        self._descriptor, self._index, self._replicas = descriptor, index, replicas
        self._buckets: list[Bucket] = []
        self._counts = memoryview(b"").cast("q")
        self._brought: list[torch.Tensor] = []
        self._sum = torch.empty(0, dtype=torch.uint8)
        self._line = 0
        self._members: list[int] = []
        self._words: list[list[int]] = []
        """Words of the members' counts, for each bucket."""
        self._blocks: list[list[tuple[torch.Tensor, list[torch.Tensor]]]] = []
        self._turn = 0
        self._begun: dict[int, bool] = {}
        """Buckets not reduced yet; True if this rank has added up its part."""
        self._wait = Wait()

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        self._buckets = list(buckets)
        segment = SumMemory(self._descriptor, self._replicas, len(buckets), size)
        self._counts, self._brought, self._sum, self._line = segment.counts, segment.brought, segment.sum, segment.line
        return self._brought[self._index], self._sum

    def form(self, group: Assemble, interrupted: Told) -> bool:
        self.meet(group.group, [roles.index_of(member.role) for member in group.members])
        return True

    def meet(self, group: int, members: Sequence[int]) -> None:
        """Join a group, whose number is higher than all earlier ones; all members must have left those."""
        self._members = list(members)
        self._words = [[i * self._line + b for i in members] for b in range(len(self._buckets))]
        self._blocks = [self._blocks_of(bucket) for bucket in self._buckets]
        self._turn = (group + 1) << GROUP_BITS  # this group's counts begin above all those of earlier groups
        self._begun = {}

    def _blocks_of(self, bucket: Bucket) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return the blocks of this replica's part of a bucket: memory for the sum, and the parts to add."""
        rank = self._members.index(self._index)
        if not bucket.adds:  # all ranks use the first rank's number
            here = slice(bucket.start, bucket.stop)
            return [] if rank else [(self._sum[here], [self._brought[self._index][here]])]
        part = cut(Range(0, bucket.length), len(self._members))[rank]
        step, blocks = BLOCK // bucket.item, []
        for first in range(part.start, part.stop, step):
            start, stop = (bucket.start + at * bucket.item for at in (first, min(first + step, part.stop)))
            slots = (self._brought[i] for i in self._members)
            views = [vector[start:stop].view(getattr(torch, bucket.dtype)) for vector in (self._sum, *slots)]
            blocks.append((views[0], views[1:]))
        return blocks

    def ready(self, bucket: int) -> None:
        """Note that a bucket is written; add up all that is ready on every rank."""
        self._tell(bucket, 2 * self._turn)
        self._begun[bucket] = False
        self._advance()

    def reduce(self) -> bool | None:
        while self._begun:
            if self._advance():
                self._wait.end()
            elif self._wait.rest():
                return None
        self._wait.end()
        self._turn += 1
        return True

    def _advance(self) -> bool:
        """Continue every bucket for which all ranks have counted enough; return whether there was one."""
        advanced = False
        for bucket, added in tuple(self._begun.items()):
            if not self._reached(bucket, 2 * self._turn + added):
                continue
            advanced = True
            if added:
                del self._begun[bucket]
            else:
                self._add_up(bucket)
                self._tell(bucket, 2 * self._turn + 1)
                self._begun[bucket] = True
        return advanced

    def _tell(self, bucket: int, count: int) -> None:
        self._counts[self._index * self._line + bucket] = count

    def _reached(self, bucket: int, count: int) -> bool:
        counts = self._counts
        for word in self._words[bucket]:
            if counts[word] < count:
                break
        else:
            return True
        return False

    def _add_up(self, number: int) -> None:
        added = 0
        for there, parts in self._blocks[number]:
            added += there.nbytes
            _add(parts, there)
        bucket, others = self._buckets[number], len(self._members) - 1
        # of its own part this rank reads the others' gradients, of other parts their sum
        read = others * added * bucket.adds + bucket.stop - bucket.start - added
        self.traffic.shared_memory[ALL_REDUCE] += read


def _add(parts: Sequence[torch.Tensor], there: torch.Tensor) -> None:
    """Add parts up in their order."""
    if len(parts) == 1:
        there.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=there)
    for part in parts[2:]:
        there.add_(part)


class _Chunk(NamedTuple):
    """Place in a window of the chunks of one length and dtype."""

    mine: slice
    """Part that this rank adds up."""
    others: tuple[slice, slice]
    """Parts before and after it."""
    brought: list[torch.Tensor]
    """Memory that each rank writes to."""
    total: torch.Tensor


class Window:
    """One rank's side of a segment through which tensors of any length pass, chunk by chunk, wherever they lie.

    There are two ranks or more. `memory` is the descriptor of the segment, which is empty at first. A process in `pids`
    that is not visible here raises an `OSError`.
    """

    # Each rank writes those parts of a chunk that others add up, adds up its own part, and reads the others' sums. It
    # writes the next chunk before it adds, and reads a chunk that was added up earlier: so it does not wait for a rank
    # that is a little late, and chunks are read while they are in the caches. All add in the order of the ranks, which
    # gives all the same bits.

    def __init__(self, rank: int, ranks: int, memory: int, pids: Sequence[int]) -> None:
        self._rank, self._ranks = rank, ranks
        self._others = [other for other in range(ranks) if other != rank]
        self._chunk = min(CHUNK, SIZE // (DEPTH * (ranks + 1))) & -mmap.PAGESIZE
        self._segment = SumMemory(memory, ranks, LEFT + 1, DEPTH * self._chunk)
        self._counts, self._line = self._segment.counts, self._segment.line
        self._done, self._kind, self._process = 0, 0, os.getpid()
        self._chunks: dict[tuple[int, torch.dtype, int], _Chunk] = {}
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        weakref.finalize(self, _close, self._watched)
        for other in self._others:
            descriptor = os.pidfd_open(pids[other])
            self._watched[descriptor] = other
            self._poll.register(descriptor, select.POLLIN)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Add up a contiguous 1-D tensor in place; all ranks have one of the same length and dtype.

        A rank that is gone, or adds up something else, raises a `RuntimeError`.
        """
        pieces, first = tensor.split(self._chunk // tensor.itemsize), self._done
        self._kind = tensor.numel() << 8 | tensor.itemsize
        self._tell(KIND, self._kind)
        chunks = [self._chunk_of(piece, (first + i) % DEPTH) for i, piece in enumerate(pieces)]
        for i in range(len(pieces) + DEPTH):
            if i >= DEPTH:
                self._read(first + i - DEPTH, pieces[i - DEPTH], chunks[i - DEPTH])
            if i < len(pieces):
                self._write(first + i, pieces[i], chunks[i])
            if 0 < i <= len(pieces):
                self._add(first + i - 1, pieces[i - 1], chunks[i - 1])
        self._done += len(pieces)

    def _write(self, number: int, piece: torch.Tensor, chunk: _Chunk) -> None:
        for part in chunk.others:
            chunk.brought[self._rank][part].copy_(piece[part])
        self._tell(number % DEPTH, 2 * (number + 1))

    def _add(self, number: int, piece: torch.Tensor, chunk: _Chunk) -> None:
        self._wait(number % DEPTH, 2 * (number + 1))
        if odd := [rank for rank in range(self._ranks) if self._count(rank, KIND) != self._kind]:
            kinds = [(rank, self._count(rank, KIND)) for rank in (self._rank, odd[0])]
            texts = (f"rank {rank} {kind >> 8} elements of {kind & 255} bytes" for rank, kind in kinds)
            raise RuntimeError(f"the ranks add up different vectors: {', '.join(texts)}")
        mine = piece[chunk.mine]
        parts = [mine if rank == self._rank else brought[chunk.mine] for rank, brought in enumerate(chunk.brought)]
        total = chunk.total[chunk.mine]
        _add(parts, total)
        self._tell(number % DEPTH, 2 * (number + 1) + 1)
        mine.copy_(total)

    def _read(self, number: int, piece: torch.Tensor, chunk: _Chunk) -> None:
        self._wait(number % DEPTH, 2 * (number + 1) + 1)
        for part in chunk.others:
            piece[part].copy_(chunk.total[part])

    def _chunk_of(self, piece: torch.Tensor, turn: int) -> _Chunk:
        key = turn, piece.dtype, piece.numel()
        if key not in self._chunks:
            mine, segment = cut(Range(0, piece.numel()), self._ranks)[self._rank], self._segment
            here = slice(turn * self._chunk, turn * self._chunk + piece.nbytes)
            *brought, total = (vector[here].view(piece.dtype) for vector in (*segment.brought, segment.sum))
            others = slice(0, mine.start), slice(mine.stop, piece.numel())
            self._chunks[key] = _Chunk(slice(mine.start, mine.stop), others, brought, total)
        return self._chunks[key]

    def _tell(self, word: int, count: int) -> None:
        self._counts[self._rank * self._line + word] = count

    def _count(self, rank: int, word: int) -> int:
        return self._counts[rank * self._line + word]

    def _wait(self, word: int, count: int) -> None:
        """Wait until the counts of all ranks have reached a value."""
        for rank in range(self._ranks):
            at, counts = rank * self._line + word, self._counts
            if counts[at] >= count:
                continue
            began = time.perf_counter()
            while counts[at] < count:
                lost = self._lost()  # checked before the count is read, since a rank may count and then leave
                if counts[at] >= count:
                    break
                waited = time.perf_counter() - began
                if lost or waited > PATIENCE_SECONDS:
                    raise RuntimeError(lost or f"rank {rank} has not arrived within {PATIENCE_SECONDS:g} s")
                rest(waited)

    def _lost(self) -> str:
        """Describe the loss of a rank that has ended or left; "" for none."""
        for descriptor, _ in self._poll.poll(0):  # this call also releases the interpreter lock for the backward pass
            return f"the process of rank {self._watched[descriptor]} has ended"
        for rank in range(self._ranks):
            if self._count(rank, LEFT):
                return f"rank {rank} has left"
        return ""

    def leave(self) -> None:
        """Leave; the other ranks notice, and so does a thread that waits here."""
        if os.getpid() == self._process:  # but not at the end of a fork of this process
            self._tell(LEFT, 1)


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
