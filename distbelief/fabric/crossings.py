"""Tensors that cross between the partitions of a split replica on one host, in a segment that all of them map.

    | partition 0: begun, sleeps, ended | partition 1: ... | stamps, even, odd, ... | slot 0 even | slot 0 odd | ...

A partition writes a tensor into a slot and stamps it with the step; the taker looks for the stamp, and reads the tensor
in place. Every slot exists twice, for even and odd steps. A partition that begins a step needs nothing older than the
last step, so others may overwrite older tensors. A stamp has one writer and only grows. The tensor is written before
its stamp, and other processors must see that order: on processors without that promise (`fabric/order`) tensors cross
as messages.

A partition that finds no stamp writes that it sleeps, and looks once more. A partition that stamps then checks whether
the other sleeps, and wakes it. Each makes its own write visible before it looks, so one of them sees the other's.
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
"""Time to look for a stamp before sleeping: waking takes longer than most crossings."""
CROWDED_SECONDS = 20e-6
"""Duration of a yield which shows that another thread works on this core; looking would disturb it."""
VIEWS_LIMIT = 1024
"""Most cached views, one for each slot and shape."""
LINE = 64
"""Distance of stamps and alignment of slots, in bytes: two cores never write to one line of a cache."""
OWN = 3
"""Words of each partition: the last step that it began, whether it sleeps, and the last step that it ended."""
TURNS = 2
"""Steps whose tensors may be in the segment at a time."""


def segment_bytes(partitions: int, slots: Sequence[int]) -> int:
    """Return the length of a segment for some partitions, with slots of these bytes.

    >>> segment_bytes(2, [100])
    768
    """
    return LINE * (OWN * partitions + TURNS * len(slots)) + TURNS * sum(map(_aligned, slots))


class Crossings:
    """One partition's end.

    Args:
        memory: of all partitions, `segment_bytes` long, 1-D uint8.
        slots: most bytes of each tensor that crosses in a step, the same at every partition.
        copies: between the memory and the device where this partition computes; None if that is the host.
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
                # views of one tensor would share the counter with which autograd notices overwritten values
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
        """Begin a step, whose number only grows; return the partitions to wake."""
        self._step = step
        if self._copies is not None:
            self._copies.settle()
        self._stamps[_word(OWN * self._partition)] = step
        return self._asleep()

    def end(self) -> list[int]:
        """End the step here: nothing more of it leaves this partition; return the partitions to wake."""
        self._stamps[_word(OWN * self._partition + 2)] = self._step
        return self._asleep()

    def ended(self, partition: int) -> bool:
        """Return whether a partition has ended the present step: any tensor of it not there by then never comes."""
        return self._stamps[_word(OWN * partition + 2)] == self._step

    def _asleep(self) -> list[int]:
        return [other for other in range(self._partitions) if other != self._partition and self.sleeps(other)]

    def give(self, slot: int, to: int, tensor: torch.Tensor) -> bool:
        """Write a tensor for a partition into a slot; return False if that partition still needs the slot's tensor.

        The partition then wakes this one when it begins its next step.
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
        """Return the tensor of a slot in the present step; None if it is not there yet.

        A tensor is valid until the next step begins here. Where it is missing, its giver wakes this partition once it
        is there.
        """
        at = self._turn(slot)
        if not self._reached(OWN * self._partitions + at, self._step):
            return None
        held = self._view(at, dtype, shape)
        self.traffic.shared_memory[PARTITIONS] += held.nbytes
        return held if self._copies is None else self._copies.copy_in(held)

    def sleeps(self, partition: int) -> bool:
        """Return whether a partition sleeps, and must be woken after a stamp for which it may wait."""
        with self._fence:  # the fence makes the stamp visible before this read
            return self._stamps[_word(OWN * partition + 1)] != 0

    def _reached(self, number: int, least: int) -> bool:
        """Look for a stamp for a moment; if it does not come, this partition sleeps from now on."""
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
