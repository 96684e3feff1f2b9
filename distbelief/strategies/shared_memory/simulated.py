"""Simulated replicas that update one mapping: updates take time there, wait for their locks, and race as real ones do.

A gradient is that of the parameters at the moment when its step begins. Its update is made in parts, each at one
moment: the ranges that have locks, or `RANGES` where nothing is locked; `--handling memory=26GB` says how fast, or
`--network reduce=10GB`. Whoever dies leaves what he has made of an update, and his locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from distbelief.core import roles
from distbelief.core.settings import Plan, Settings
from distbelief.errors import UsageError
from distbelief.sharding.layout import Layout, Range
from distbelief.strategies.context import VirtualStage
from distbelief.strategies.shared_memory import mapping
from distbelief.strategies.shared_memory.counts import Counts
from distbelief.strategies.shared_memory.locks import Queues, RoundRobin, waits_for
from distbelief.strategies.shared_memory.mapped import LockedStep
from distbelief.strategies.shared_memory.settings import MemoryUpdates


class Race:
    """Common state of the simulated replicas of one mapping: its locks and turns, and who updates it."""

    def __init__(self) -> None:
        self.locks, self.order = Queues(), RoundRobin()
        self.updaters: dict[str, SimulatedUpdater] = {}


class Updated(Protocol):
    """Memory that one replica updates."""

    counts: Counts

    def begin(self, arrays: Mapping[str, torch.Tensor] | None, facts: Mapping[str, object]) -> None:
        """Fill the mapping: with the model's own values, or those of a checkpoint."""

    def look(self) -> None:
        """Begin a step."""

    def locked_steps(self) -> list[LockedStep]:
        """The update with the gradient of the step, in its parts."""
        ...

    def arrays(self) -> dict[str, torch.Tensor]:
        """Everything in the mapping, by name."""
        ...


class SimulatedUpdater:
    """Makes the updates of one life of a replica, which take the time of their bytes.

    Args:
        stage: where it is played.
        role: of the replica.
        held: gives what it updates.
        settings: of the job.
    """

    def __init__(self, stage: VirtualStage, role: str, held: Callable[[], Updated], settings: Settings) -> None:
        self._stage, self._role, self.held, self._dead = stage, role, held, False
        self._index, self._by_turns = roles.index_of(role), settings.own(MemoryUpdates).by_turns
        self._awaits_turn = False
        self._race = stage.shared(Race)
        self._race.updaters[role] = self
        stage.died.append(self._die)
        self._parts: deque[LockedStep] = deque()
        self._wanted: deque[int] = deque()
        self._then: Callable[[], None] = lambda: None

    def waits(self) -> str:
        """For which lock it waits, or for its turn."""
        if self._awaits_turn:
            return waits_for(self._race.order.turn)
        return (
            f"for the lock of range {self._wanted[0]}, which {self._race.locks.holder(self._wanted[0])} holds"
            if self._wanted
            else ""
        )

    def enter(self) -> None:
        """A gradient is about to be computed."""
        if self._by_turns and not self._dead:  # who dies as it sends goes on until it waits
            self._race.order.enter(self._index)

    def leave(self) -> None:
        """No gradient is computed for now."""
        if self._by_turns:
            self._go_on_with(self._race.order.leave(self._index))

    def update(self, samples: int, interrupted: Callable[[], bool], answer: Callable[[bool], None]) -> bool | None:
        """Make one part of the update after the other."""

        def done() -> None:
            self.held().counts.add(samples)
            self._stage.clock.call_later(0.0, answer, True)
            if self._by_turns:  # and the next one begins when this one may have looked at the parameters
                self._go_on_with(self._race.order.give(self._index))

        if self._dead:  # as in `enter`: it waits from here on, for nothing
            return None
        self._parts.extend(self.held().locked_steps())
        self._then = done
        self._line_up()
        self._awaits_turn = self._by_turns and not self._race.order.ask(self._index)
        if not self._awaits_turn:
            self._advance()
        return None

    def _die(self) -> None:
        self._dead = True
        self.leave()
        for other in self._race.locks.release_dead(self._role):
            self._stage.clock.call_later(0.0, self._race_on, other)

    def _go_on_with(self, replica: int | None) -> None:
        """One has its turn, for which it waited."""
        if replica is not None:
            self._stage.clock.call_later(0.0, self._race_on, roles.replica(replica))

    def _race_on(self, role: str) -> None:
        """One has what it waited for."""
        self._race.updaters[role].go_on()

    def _line_up(self) -> None:
        """Note which locks the next part needs."""
        self._wanted = deque(self._parts[0].locks) if self._parts else deque()

    def go_on(self) -> None:
        """A lock or a turn that was waited for is had, unless that was in another life."""
        if self._awaits_turn and self._race.order.has(self._index):
            self._awaits_turn = False
            self._advance()
        elif self._wanted and self._race.locks.holder(self._wanted[0]) == self._role and not self._dead:
            self._wanted.popleft()
            self._advance()

    def _advance(self) -> None:
        """Take the locks of the next part, and make it when its time has passed."""
        while self._parts:
            while self._wanted:
                if not self._race.locks.ask(self._role, self._wanted[0]):
                    return
                self._wanted.popleft()
            if seconds := self._seconds(self._parts[0].size):
                self._stage.endpoint.thread.do(seconds, self._made, None)
                return
            self._make()
        self._then()

    def _seconds(self, size: int) -> float:
        """Return how long it takes to update so many bytes of parameters."""
        work, reduction = self._stage.endpoint.work, self._stage.endpoint.network.model.reduction
        return size * reduction if reduction or work is None else work.update(size)

    def _made(self, _: None) -> None:
        if not self._dead:
            self._make()
            self._advance()

    def _make(self) -> None:
        part = self._parts.popleft()
        with torch.no_grad():
            part.act()
        for number in part.locks:
            if other := self._race.locks.give(self._role, number):
                self._stage.clock.call_later(0.0, self._race_on, other)
        self._line_up()


def check_phantom(layout: Layout) -> None:
    """Refuse a phantom whose updates' parts nobody can tell.

    Raises:
        UsageError: some gradients are rows.
    """
    if any(layout.is_sparse(entry) for entry in layout.trained_entries):
        raise UsageError("--phantom computes no gradients, and which rows an update writes to is in them: leave it off")


class PhantomModel:
    """Phantom of a mapping: the lengths of an update's parts, and its counts.

    Args:
        counts: of the replica, in the mapping.
        plan: of the job.
        cut: as a `MappedModel`'s.
    """

    def __init__(self, counts: Counts, plan: Plan, cut: Sequence[Range] = ()) -> None:
        self.counts = counts
        settings, locks = plan.settings, plan.settings.own(MemoryUpdates).locking
        locked = {"none": mapping.RANGES, "shard": settings.shards, **dict.fromkeys(mapping.WHOLE, 1)}[locks]
        parts = cut or mapping.ranges(plan.layout, min(locked, plan.layout.parameters))
        self._parts = [
            LockedStep(() if locks == "none" else (number,), part.size, lambda: None)
            for number, part in enumerate(parts)
        ]

    def begin(self, arrays: Mapping[str, torch.Tensor] | None, facts: Mapping[str, object]) -> None:
        """Begin with what was done before."""
        self.counts.begin(dict(facts))

    def look(self) -> None:
        """Begin a step."""
        self.counts.look()

    def arrays(self) -> dict[str, torch.Tensor]:
        """It holds none."""
        return {}

    def locked_steps(self) -> list[LockedStep]:
        """An update that changes nothing, in its parts."""
        return self._parts
