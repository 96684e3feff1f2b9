"""The slice that replicas update without a lock (Niu et al. 2011): of the memory in `server.passed` it uses the first
buffer of parameters, half 0 of the optimizer's state, and counts in place of the notes.

Each element is written by itself, so the slice is never of one moment. Each replica has a row of counts that it alone
writes, and the shard has one for the updates before. So concurrent counts are not lost, and a dead replica's counts
stay. No write needs to be visible before another: any processor's order is right.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence

import torch

from distbelief.core import records
from distbelief.core.conversations import initialising
from distbelief.core.effects import Effect, Payload
from distbelief.core.events import Event
from distbelief.core.messages import Version
from distbelief.core.settings import Plan
from distbelief.server.passed import ROW, Memory, PassedLayout
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, TorchSlice

UPDATES, SAMPLES, FILLED, STALENESS = 0, 1, 2, 3
"""Columns of a row: updates, samples in them, whether there are parameters, and updates of each staleness; the last
column counts all higher ones.
"""


class Counts:
    """Rows of counts, as one replica or the shard uses them.

    Args:
        memory: shared whole numbers, zeroed in the beginning.
        replicas: number of replicas.
        index: of this replica; the shard has the next after all.

    >>> memory = [0] * 3 * ROW
    >>> shard, one, other = Counts(memory, 2, 2), Counts(memory, 2, 0), Counts(memory, 2, 1)
    >>> shard.begin(5, 50, {}); one.look(); other.look(); other.add(64); one.add(64)
    >>> shard.total(UPDATES), shard.total(SAMPLES), shard.staleness()
    (7, 178, {0: 1, 1: 1})
    """

    def __init__(self, memory: MutableSequence[int] | memoryview, replicas: int, index: int) -> None:
        self._memory, self._before, self._row = memory, replicas * ROW, index * ROW
        self._seen = 0

    @property
    def filled(self) -> bool:
        """True once there are parameters."""
        return bool(self._memory[self._before + FILLED])

    def begin(self, updates: int, samples: int, staleness: Mapping[int, int]) -> None:
        """Note that there are parameters, after so many updates and samples."""
        memory, before = self._memory, self._before
        memory[before + UPDATES], memory[before + SAMPLES] = updates, samples
        for number, count in staleness.items():
            memory[before + min(STALENESS + number, ROW - 1)] += count
        memory[before + FILLED] = 1

    def look(self) -> None:
        """Note the number of updates before a gradient is computed."""
        self._seen = self.total(UPDATES)

    def add(self, samples: int) -> None:
        """Count an update with that gradient."""
        memory, row = self._memory, self._row
        memory[row + min(STALENESS + self.total(UPDATES) - self._seen, ROW - 1)] += 1
        memory[row + SAMPLES] += samples
        memory[row + UPDATES] += 1

    def total(self, what: int) -> int:
        """Return the sum of one count over all rows."""
        return sum(self._memory[what::ROW])

    def staleness(self) -> dict[int, int]:
        """Return the number of updates of each staleness."""
        return {at - STALENESS: count for at in range(STALENESS, ROW) if (count := self.total(at))}


class UnlockedSlice(TorchSlice):
    """The shard's view of the slice."""

    lasts = True

    def __init__(self, plan: Plan, memory: Memory) -> None:
        layout, replicas = PassedLayout(plan), plan.settings.replicas
        room = memory(layout.length)
        whole, ranges = layout.vector(room, 0), plan.assignments[0]
        moving, frozen = (whole[part.start : part.stop] for part in (ranges.moving, ranges.frozen))
        super().__init__(plan, 0, moving, frozen)
        self.counts = Counts(layout.rows(room), replicas, replicas)
        self._kept = layout.state(room)
        if not self.counts.filled:
            self.load(super().arrays())  # some optimizers have a state before their first step

    def arrays(self) -> dict[str, torch.Tensor]:
        for name, value in self._kept.items():
            if name.endswith(".step"):
                value.fill_(self.counts.total(UPDATES))
        return {"vector.moving": self._moving, "vector.frozen": self._frozen, **self._kept}

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        for name, value in self.arrays().items():
            if name in arrays and arrays[name].data_ptr() != value.data_ptr():
                value.copy_(arrays[name])


class UnlockedPhantom(PhantomSlice):
    """Slice without values, for simulations: it only counts updates."""

    lasts = True

    def __init__(self, plan: Plan, memory: Memory) -> None:
        super().__init__(plan, 0)
        self.counts = phantom_counts(plan, memory, plan.settings.replicas)


def phantom_counts(plan: Plan, memory: Memory, index: int) -> Counts:
    """Return counts in memory that holds nothing else."""
    replicas = plan.settings.replicas
    return Counts(memory(8 * (replicas + 1) * ROW).numpy().data.cast("q"), replicas, index)


def unlocked_slice(plan: Plan, memory: Memory, phantom: bool) -> UnlockedSlice | UnlockedPhantom:
    """Make the shard's view of the slice, or a phantom of it."""
    return UnlockedPhantom(plan, memory) if phantom else UnlockedSlice(plan, memory)


class UnlockedShard(Shard):
    """The only shard of replicas that update its memory themselves: it reads their counts."""

    _counts: Counts | None = None

    def _restore(self, sender: str, event: initialising.Restore, payload: Payload | None) -> list[Effect]:
        held = self._make(event.plan, self.index)
        assert isinstance(held, UnlockedSlice | UnlockedPhantom)
        self._make, self._counts = lambda *_: held, held.counts
        if not held.counts.filled:
            return super()._restore(sender, event, payload)
        incarnation = self.version.incarnation
        self.share(event.plan)
        self._count_updates()
        return self.begin_life(incarnation)

    def _count_updates(self) -> None:
        counts = self._counts
        if counts is not None and counts.filled:
            self.version = Version(self.version.incarnation, counts.total(UPDATES))
            self.samples, self.staleness = counts.total(SAMPLES), counts.staleness()

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        self._count_updates()
        effects = super().handle(sender, event, payload)
        if self._counts is not None and not self._counts.filled and not self.waits():
            self._counts.begin(self.version.updates, self.samples, self.staleness)
        return effects

    def account(self) -> records.Applied:
        self._count_updates()
        return super().account()

    def standing(self) -> dict[str, object]:
        self._count_updates()
        return super().standing()
