"""All-reduce between the processes of one host, of tensors that lie anywhere: through a window of shared memory.

It is a lowering of `direct`, chunk by chunk. Of each chunk every rank writes the parts that others add up, adds up its
own part of it as soon as all have written theirs, and reads the parts that others have added up. It writes the next
chunk before it adds, and reads one that was added before: who is a little late is not waited for, and what one core has
just written another reads before it has left the caches. The order of the sum is that of the ranks, so all of them hold
the same bits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
import weakref
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from distbelief.fabric.shared_memory import in_order
from distbelief.fabric.waiting import SPIN_SECONDS, rest
from distbelief.schedules.allreduce import cut
from distbelief.schedules.schedule import RankStep
from distbelief.sharding.layout import Range

CHUNK = 1 << 20
"""Bytes of a tensor that pass at a time, where there are few ranks."""
DEPTH = 2
"""Chunks that the window has room for."""
SIZE = 64 << 20
"""Most bytes of the chunks in a window."""
LINE = 64
"""Bytes between two counts: what two cores write lies not in one line of a cache."""
PATIENCE_SECONDS = 1800.0
"""Longest wait for another, who lives: as long as in a group of gloo's."""
WRITTEN, ADDED, READ, KIND, LEFT = COUNTS = range(5)
"""Counts of each rank: its chunks, what it adds up, and whether it has left."""


class _Chunk(NamedTuple):
    """The places in the window, for chunks of one length and dtype."""

    writes: list[tuple[slice, torch.Tensor]]
    """This rank's: the parts that others add up."""
    own: slice
    parts: list[torch.Tensor]
    """Parts that the others wrote for this rank, by rank; its own is not there."""
    total: torch.Tensor
    """Sum of this rank's part."""
    reads: list[tuple[slice, torch.Tensor]]
    """The totals of the others' parts."""


class Window:
    """One rank's side of a window.

    Args:
        rank: of this process.
        ranks: how many there are, at least two.
        memory: descriptor of the segment, empty at first; it may be closed thereafter.
        pids: of all ranks.

    Raises:
        OSError: a process of another rank is not seen from here.
    """

    algorithm = "shared"

    def __init__(self, rank: int, ranks: int, memory: int, pids: list[int]) -> None:
        self._rank, self._ranks = rank, ranks
        self._others = [other for other in range(ranks) if other != rank]
        self._chunk = min(CHUNK, SIZE // (DEPTH * (ranks + 1))) & -mmap.PAGESIZE
        flags = -(-len(COUNTS) * ranks * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        size = DEPTH * (ranks + 1) * self._chunk
        os.ftruncate(memory, flags + size)
        mapping = mmap.mmap(memory, flags + size)
        self._counts = memoryview(mapping)[:flags].cast("q")
        room = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=flags)
        self._room = room.view(DEPTH, ranks + 1, self._chunk)
        self._done, self._kind, self._process = 0, 0, os.getpid()
        self._passing: Iterator[bool] = iter(())
        self._chunks: dict[tuple[torch.dtype, int], list[_Chunk]] = {}
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        weakref.finalize(self, _close, self._watched)
        for other in self._others:
            descriptor = os.pidfd_open(pids[other])
            self._watched[descriptor] = other
            self._poll.register(descriptor, select.POLLIN)

    def post(self, vector: torch.Tensor, step: RankStep) -> None:
        """Begin with a contiguous 1-D tensor, added up in place; all ranks do so with one of its length and dtype."""
        self._passing = self._pass(vector)

    def take(self, vector: torch.Tensor, step: RankStep) -> bool:
        """Add it up as far as it goes, after a rest where others are waited for; whether it is added up.

        Raises:
            RuntimeError: a rank is gone, or adds up something else.
        """
        return next(self._passing, True)

    def _pass(self, tensor: torch.Tensor) -> Iterator[bool]:
        """Pass a tensor through the window, and say False at each rest."""
        pieces, first = tensor.split(self._chunk // tensor.itemsize), self._done
        self._kind = tensor.numel() << 8 | tensor.itemsize
        self._tell(KIND, self._kind)
        chunks = [self._places(piece)[(first + i) % DEPTH] for i, piece in enumerate(pieces)]
        for i in range(len(pieces) + 2):
            if i < len(pieces):
                yield from self._write(first + i, pieces[i], chunks[i])
            if 0 <= i - 1 < len(pieces):
                yield from self._add(first + i - 1, pieces[i - 1], chunks[i - 1])
            if 0 <= i - 2 < len(pieces):
                yield from self._read(first + i - 2, pieces[i - 2], chunks[i - 2])
        self._done += len(pieces)

    def _write(self, number: int, piece: torch.Tensor, chunk: _Chunk) -> Iterator[bool]:
        yield from self._wait(ADDED, number + 1 - DEPTH)  # what was there has been added up
        for part, place in chunk.writes:
            place.copy_(piece[part])
        self._tell(WRITTEN, number + 1)

    def _add(self, number: int, piece: torch.Tensor, chunk: _Chunk) -> Iterator[bool]:
        yield from self._wait(READ, number + 1 - DEPTH)
        yield from self._wait(WRITTEN, number + 1)
        if odd := [rank for rank in range(self._ranks) if self._count(rank, KIND) != self._kind]:
            kinds = [(rank, self._count(rank, KIND)) for rank in (self._rank, odd[0])]
            texts = (f"rank {rank} {kind >> 8} elements of {kind & 255} bytes" for rank, kind in kinds)
            raise RuntimeError(f"the ranks add up different vectors: {', '.join(texts)}")
        mine = piece[chunk.own]
        parts = [*chunk.parts[: self._rank], mine, *chunk.parts[self._rank + 1 :]]
        torch.add(parts[0], parts[1], out=chunk.total)
        for part in parts[2:]:
            chunk.total.add_(part)
        self._tell(ADDED, number + 1)
        mine.copy_(chunk.total)

    def _read(self, number: int, piece: torch.Tensor, chunk: _Chunk) -> Iterator[bool]:
        yield from self._wait(ADDED, number + 1)
        for part, place in chunk.reads:
            piece[part].copy_(place)
        self._tell(READ, number + 1)

    def _places(self, piece: torch.Tensor) -> list[_Chunk]:
        key = piece.dtype, piece.numel()
        if key not in self._chunks:
            ranges = [slice(part.start, part.stop) for part in cut(Range(0, piece.numel()), self._ranks)]
            mine = ranges[self._rank]
            self._chunks[key] = [
                _Chunk(
                    [(ranges[other], slots[self._rank][ranges[other]]) for other in self._others],
                    mine,
                    [slots[other][mine] for other in range(self._ranks)],
                    slots[self._ranks][mine],
                    [(ranges[other], slots[self._ranks][ranges[other]]) for other in self._others],
                )
                for slots in self._room.view(piece.dtype)
            ]
        return self._chunks[key]

    # counts: each has one writer and only grows; what it speaks of is written before it, which x86-64 processors let
    # others see in that order

    def _tell(self, what: int, count: int) -> None:
        self._counts[(len(COUNTS) * self._rank + what) * LINE // 8] = count

    def _count(self, rank: int, what: int) -> int:
        return self._counts[(len(COUNTS) * rank + what) * LINE // 8]

    def _wait(self, what: int, count: int) -> Iterator[bool]:
        """Wait until all ranks have counted so far; False after each rest that is longer than a look."""
        for rank in range(self._ranks):
            at, counts = (len(COUNTS) * rank + what) * LINE // 8, self._counts
            if counts[at] >= count:
                continue
            began = time.perf_counter()
            while counts[at] < count:
                lost = self._lost()  # looked at before the count is: it may have counted and left
                if counts[at] >= count:
                    break
                waited = time.perf_counter() - began
                if lost or waited > PATIENCE_SECONDS:
                    raise RuntimeError(lost or f"rank {rank} has not come within {PATIENCE_SECONDS:g} s")
                rest(waited)
                if waited >= SPIN_SECONDS:
                    yield False

    def _lost(self) -> str:
        """Name the rank that has ended or left; "" for none."""
        for descriptor, _ in self._poll.poll(0):  # which lets the thread of the backward pass have the interpreter
            return f"the process of rank {self._watched[descriptor]} has ended"
        for rank in range(self._ranks):
            if self._count(rank, LEFT):
                return f"rank {rank} has left"
        return ""

    def leave(self) -> None:
        """Add up no more; the others, and who waits here in a thread, are told."""
        if os.getpid() == self._process:  # and not one that was forked from it, and ends
            self._tell(LEFT, 1)


def open_window(rank: int, ranks: int, group: dist.ProcessGroup | None) -> Window | None:
    """A window between all ranks of a group, which all ask for at once.

    None, on all of them, where they cannot share memory.

    Raises:
        RuntimeError: a rank is gone.
    """
    memory = -1
    window: Window | None = None
    with contextlib.suppress(OSError, AttributeError):  # where there is none, the others are to know
        memory = os.memfd_create("distbelief window") if rank == 0 else -1
    try:
        mine = torch.tensor([_here(), os.getpid(), memory, os.fstat(memory).st_ino if memory >= 0 else 0], device="cpu")
        all_of = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(all_of, mine, group=group)
        hosts, pids, (place, *_), (inode, *_) = (list(map(int, column)) for column in zip(*all_of, strict=True))
        if in_order() and place >= 0 and hosts[0] >= 0 and len(set(hosts)) == 1:
            with contextlib.suppress(OSError), open(f"/proc/{pids[0]}/fd/{place}", "r+b", buffering=0) as segment:
                if os.fstat(segment.fileno()).st_ino == inode:  # and /proc is that of these processes
                    window = Window(rank, ranks, segment.fileno(), pids)
        all_can = torch.tensor([int(window is not None)], device="cpu")
        dist.all_reduce(all_can, dist.ReduceOp.MIN, group=group)
    except BaseException:
        if window:
            window.leave()
        raise
    finally:
        if memory >= 0:
            os.close(memory)
    if window and not all_can:
        window.leave()
    return window if all_can else None


def _here() -> int:
    """A number that processes have in common which see each other's ids and memory; -1 for none.

    It is that of one start of a machine, and one container.
    """
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return -1
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
