"""A replica that updates the mapping of its job, and the evaluator that reads it, as processes and simulated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan, Settings
from distbelief.runtime.player import Answer, PlayedRole, Worker
from distbelief.sharding.layout import Range
from distbelief.strategies.context import Context, ProcessStage, VirtualStage
from distbelief.strategies.shared_memory import mapping
from distbelief.strategies.shared_memory.counts import Counts
from distbelief.strategies.shared_memory.mapped import LockedStep, MappedModel, mapped_layout
from distbelief.strategies.shared_memory.replica import SharedMemoryReplica
from distbelief.strategies.shared_memory.settings import MemoryUpdates
from distbelief.strategies.shared_memory.simulated import PhantomModel, SimulatedUpdater, Updated, check_phantom
from distbelief.strategies.shared_memory.turns import UpdateTurns
from distbelief.tasks.worker import measure
from distbelief.transport.base import Arena
from distbelief.transport.locks import Locks


class ProcessUpdater:
    """Makes the updates of a process, each part under the locks of the mapping's file.

    Args:
        stage: of the process.
        held: gives what it updates.
        index: of the replica.
        settings: of the job.
    """

    def __init__(self, stage: ProcessStage, held: Callable[[], Updated], index: int, settings: Settings) -> None:
        self._held = held
        locks = Locks(stage.descriptor(), lambda process: held().counts.holder(process))
        by_turns = settings.own(MemoryUpdates).by_turns
        self._turns = UpdateTurns(locks, lambda: held().counts, index, settings.replicas) if by_turns else None
        self._locks = self._turns or locks
        self._left: list[LockedStep] | None = None

    def waits(self) -> str:
        """For which lock it waits, or for its turn, and who has it."""
        return self._locks.waits()

    def enter(self) -> None:
        """A gradient is about to be computed."""
        if self._turns:
            self._turns.enter()

    def leave(self) -> None:
        """No gradient is computed for now."""
        if self._turns:
            self._turns.leave()

    def update(self, samples: int, interrupted: Callable[[], bool], answer: Callable[[bool], None]) -> bool | None:
        """Step the parameters, each part under its locks; under those of the last the update is counted too."""
        locks: Sequence[int] = ()
        with torch.no_grad():
            left = self._left = self._left or self._held().locked_steps()
            while left:
                locks = left[0].locks
                if locks and not self._locks.take(locks, interrupted):
                    return False
                left.pop(0).act()
                if left:
                    self._locks.give(locks)
        self._left = None
        self._held().counts.add(samples)
        self._locks.give(locks)
        return True


def replica(context: Context) -> PlayedRole:
    """Return what a replica plays."""
    index, stage = roles.index_of(context.role), context.stage
    attached = list[Updated]()

    def held() -> Updated:
        return attached[-1]

    updater: ProcessUpdater | SimulatedUpdater
    if isinstance(stage, ProcessStage):
        updater = ProcessUpdater(stage, held, index, context.settings)
    else:
        assert isinstance(stage, VirtualStage)
        if context.flat is None:
            check_phantom(context.vectors.layout)
        updater = SimulatedUpdater(stage, context.role, held, context.settings)
    compute = context.computes(context.settings.clip_norm)

    def looked(batch: Batch, answer: Answer) -> Computed | None:
        updater.enter()
        held().look()
        return compute(batch, answer)

    def attach(plan: Plan, _: Arena) -> None:
        memory, cut = memory_of(context, plan), tuple[Range, ...]()
        if isinstance(stage, VirtualStage) and plan.settings.own(MemoryUpdates).locking == "none":
            cut = mapping.ranges(plan.layout, min(mapping.RANGES, plan.layout.parameters))  # each part at one moment
        there = mapped_layout(plan)
        counted = memory[there.counts : there.length].numpy().data.cast("q")
        counts = Counts(counted, plan.settings.replicas, index)
        if context.flat is None:
            attached.append(PhantomModel(counts, plan, cut))
        else:
            holder = os.getpid() if isinstance(stage, ProcessStage) else 0
            attached.append(MappedModel(context.flat, counts, holder, plan, memory, cut))

    story = SharedMemoryReplica(
        context.role,
        context.vectors.layout,
        context.samples,
        context.incarnation,
        lambda: (held().arrays(), held().counts.facts()),
        updater.waits,
    )
    worker = Worker(
        attach,
        looked,
        begin=lambda arrays, facts: held().begin(arrays, facts),
        update=updater.update,
        rest=updater.leave,
    )
    return PlayedRole(story, worker)


def reader(context: Context) -> Worker:
    """Return who measures for the evaluator: a copy of the mapping as it is."""
    flat, copies = context.module, list[tuple[torch.Tensor, torch.Tensor]]()

    def attach(plan: Plan, arena: Arena) -> None:
        flat.bind((), arena.parameters)
        copies.append((arena.parameters[0], memory_of(context, plan)[: plan.layout.total]))

    def measure_copy() -> Measured:
        copy, there = copies[-1]
        copy.copy_(there)
        return measure(context.task, flat.module)

    return Worker(attach, measure=measure_copy)


def memory_of(context: Context, plan: Plan) -> torch.Tensor:
    """The mapping of a job (1-D uint8), as long as it must be."""
    assert context.stage.memory is not None
    return context.stage.memory(mapped_layout(plan).length)
