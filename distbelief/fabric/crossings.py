"""Tensors that cross between the partitions of a split replica on one host: each lies in one segment that all of them
map.

    | partition 0: begun, sleeps, ended | partition 1: ... | stamps, even, odd, ... | slot 0 even | slot 0 odd | ...

A partition writes what it gives into a slot and stamps it with the step; who takes it looks for the stamp, and reads it
where it lies. Every slot is there twice, for even and odd steps: a partition that begins a step needs nothing of the
step before the last any more, so that others may write over what it took then. A stamp has one writer and only grows;
what it speaks of is written before it, which others must see in that order: where the processor is no x86-64 one
(`fabric/order`), tensors cross as messages.

Who has looked in vain writes down that it sleeps, and looks once more; who stamps something looks afterwards whether
the other sleeps, and is to wake it. One of the two sees what the other wrote, as each lets its own be seen before it
looks.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from distbelief.core.messages import PARTITIONS, Traffic
from distbelief.fabric.pinned import DeviceCopies

LOOK_SECONDS = 1e-3
"""Time of looking for a stamp before one sleeps: waking takes longer than most of what crosses."""
CROWDED_SECONDS = 20e-6
"""A yield that takes longer has let somebody else work on this core: whoever looks would be in his way."""
VIEWS_LIMIT = 1024
"""Most tensors that are kept, of slots and shapes."""
LINE = 64
"""Bytes from one stamp to the next, and what slots are aligned to: what a core writes is in no line of another's."""
OWN = 3
"""Words of each partition: the step that it has begun, whether it sleeps, and the step that it has ended."""
TURNS = 2
"""Steps of which what crosses may be in the segment."""


def segment_bytes(partitions: int, slots: Sequence[int]) -> int:
    """Return the length of the segment that so many partitions need for slots of these bytes each.

    >>> segment_bytes(2, [100])
    768
    """
    return LINE * (OWN * partitions + TURNS * len(slots)) + TURNS * sum(map(_aligned, slots))


class Crossings:
    """One partition's end.

    Args:
        memory: of all partitions: `segment_bytes` of them, 1-D uint8.
        partition: whose end it is.
        partitions: how many there are.
        slots: bytes of each thing that may cross in a step, the same at every partition.
        copies: between the memory and the device where this partition computes; None where that is the host.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        partition: int,
        partitions: int,
        slots: Sequence[int],
        copies: DeviceCopies | None = None,
    ) -> None:
        data: Any = memory.numpy()
        self._stamps = memoryview(data)[: LINE * (OWN * partitions + TURNS * len(slots))].cast("q")
        start = len(self._stamps) * self._stamps.itemsize
        self._slots = []
        for size in slots:
            for _ in range(TURNS):
                # a tensor of its own for each: views of one share the counter by which autograd finds that a value has
                # been overwritten
                held = (
                    torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)
                    if size
                    else torch.empty(0, dtype=torch.uint8)
                )
                self._slots.append(held)
                start += _aligned(size)
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._partition, self._partitions, self._copies = partition, partitions, copies
        self._step = 0
        self.traffic = Traffic()
        self._fence = threading.Lock()

    def begin(self, step: int) -> list[int]:
        """Begin a step, which needs nothing of those before; steps only grow, over lives and generations too.

        Returns:
            Partitions that are to be woken.
        """
        self._step = step
        if self._copies is not None:
            self._copies.settle()
        self._stamps[_word(OWN * self._partition)] = step
        return self._asleep()

    def end(self) -> list[int]:
        """The step has ended here: nothing more of it crosses from this partition.

        Returns:
            Partitions that are to be woken.
        """
        self._stamps[_word(OWN * self._partition + 2)] = self._step
        return self._asleep()

    def ended(self, partition: int) -> bool:
        """Return whether a partition has ended the step made here: what it gives in it can be taken then, or never."""
        return self._stamps[_word(OWN * partition + 2)] == self._step

    def _asleep(self) -> list[int]:
        return [
            partition
            for partition in range(self._partitions)
            if partition != self._partition and self.sleeps(partition)
        ]

    def give(self, slot: int, to: int, tensor: torch.Tensor) -> bool:
        """Have something cross to a partition: a tensor of at most the slot's bytes, where this one computes.

        False where that partition needs what lies in the slot, as it has not begun the step before: this one is woken
        when it does, and is to ask again.
        """
        if not self._reached(OWN * to, self._step - TURNS + 1):
            return False
        at = self._turn(slot)
        held = self._view(at, tensor.dtype, tuple(tensor.shape))
        if self._copies is None:
            held.copy_(tensor)
        else:
            self._copies.copy_out(tensor, held)
        self._stamps[_word(OWN * self._partitions + at)] = self._step
        return True

    def take(self, slot: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Take what has crossed in this step, where this partition computes; it stays as it is until the next begins
        here.

        None where nothing has: this partition is woken when it has, and is to ask again.
        """
        at = self._turn(slot)
        if not self._reached(OWN * self._partitions + at, self._step):
            return None
        held = self._view(at, dtype, shape)
        self.traffic.shared_memory[PARTITIONS] += held.nbytes
        return held if self._copies is None else self._copies.copy_in(held)

    def sleeps(self, partition: int) -> bool:
        """Return whether a partition sleeps: it is to be woken after something has been stamped that concerns it."""
        with self._fence:  # what was stamped is to be seen before this is looked at
            return self._stamps[_word(OWN * partition + 1)] != 0

    def _reached(self, number: int, least: int) -> bool:
        """Look for a stamp; where it does not come for a moment, this partition sleeps from now on."""
        stamps, word, asleep = self._stamps, _word(number), _word(OWN * self._partition + 1)
        stamps[asleep] = 0
        if stamps[word] >= least:
            return True
        now = perf_counter()
        end = now + LOOK_SECONDS
        while now < end:
            os.sched_yield()
            if stamps[word] >= least:
                return True
            before, now = now, perf_counter()
            if now - before > CROWDED_SECONDS:
                break
        stamps[asleep] = 1
        with self._fence:
            if stamps[word] < least:
                return False
        stamps[asleep] = 0
        return True

    def _view(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        key = (at, dtype, shape)
        known = self._views.get(key)
        if known is None:
            if len(self._views) >= VIEWS_LIMIT:
                self._views.clear()
            size = dtype.itemsize * math.prod(shape)
            known = self._views[key] = self._slots[at][:size].view(dtype).reshape(shape)
        return known

    def _turn(self, slot: int) -> int:
        return TURNS * slot + self._step % TURNS


def _word(number: int) -> int:
    return number * (LINE // 8)


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE
