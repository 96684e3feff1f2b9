"""A replica that updates the mapping of its job, and the evaluator that reads it, each as one process of the
machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import torch

from distbelief.core import mapping, roles
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.record.restore import Store
from distbelief.runtime.player import Worker
from distbelief.strategies.process import Compute, Context, Part, ProcessSpec, open_memory
from distbelief.strategies.shared_memory.mapped import LockedStep, MappedModel
from distbelief.strategies.shared_memory.replica import Hogwild
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, measure
from distbelief.transport.base import Arena
from distbelief.transport.locks import Locks


class MappedReplica:
    """Who computes and updates for one replica.

    Args:
        spec: of the job.
        role: of the replica.
        flat: its model.
        task: what is trained.
        padded: makes what computes as slow as the cluster's compute model has it.
    """

    def __init__(
        self, spec: ProcessSpec, role: str, flat: FlatModule, task: Task, padded: Callable[[Compute], Compute]
    ) -> None:
        settings = spec.settings
        self._spec, self._role = spec, role
        self._trainer = Trainer(
            task, flat.module, settings.data.batch_size, settings.seed, settings.clip_norm, settings.data.drop_last
        )
        self._compute = padded(self._trainer.compute)
        self._descriptor = open_memory(spec)
        self.mapped = MappedModel(flat, roles.index_of(role), os.getpid())
        self._locks = Locks(self._descriptor, lambda process: self.mapped.counts.holder(process))
        self._left: list[LockedStep] | None = None
        self.store = Store(spec.run)

    def story(self, incarnation: int) -> Hogwild:
        """What it plays."""
        mapped = self.mapped
        return Hogwild(
            self._role,
            mapped.flat.layout,
            len(self._trainer.data),
            incarnation,
            lambda: (mapped.arrays(), mapped.counts.facts()),
            self._locks.waits,
        )

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Map the memory."""
        self.mapped.bind(plan, memory_of(self._descriptor, plan))

    def begin(self, arrays: dict[str, Any] | None, facts: dict[str, Any]) -> None:
        """Fill it."""
        self.mapped.begin(arrays, facts)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch at the parameters as they are."""
        self.mapped.look()
        return self._compute(batch)

    def update(self, samples: int, told: Callable[[], bool], answer: Callable[[bool], None]) -> bool | None:
        """Step the parameters, each part under its locks."""
        with torch.no_grad():
            left = self._left = self._left or self.mapped.locked_steps()
            while left:
                if left[0].locks and not self._locks.take(left[0].locks, told):
                    return False
                left[0].act()
                self._locks.give(left.pop(0).locks)
        self._left = None
        self.mapped.counts.add(samples)
        return True

    def measure(self) -> Measured:
        """Replicas do not measure."""
        raise UsageError("a replica measures nothing")


def part(context: Context) -> Part:
    """What a process plays for a replica."""
    replica = MappedReplica(context.spec, context.role, context.flat, context.task, context.padded)
    return Part(replica.story(context.incarnation), replica, replica.store)


def reader(spec: ProcessSpec, flat: FlatModule, task: Task) -> Worker:
    """Who measures for the evaluator."""
    return Reader(spec, flat, task)


class Reader:
    """Who measures for the evaluator: a copy of the mapping as it is."""

    def __init__(self, spec: ProcessSpec, flat: FlatModule, task: Task) -> None:
        self._spec, self._flat, self._task = spec, flat, task

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Map the memory."""
        descriptor = open_memory(self._spec)
        self._there = memory_of(descriptor, plan)[: plan.layout.total]
        os.close(descriptor)
        self._flat.bind((), arena.parameters)
        self._copy = arena.parameters[0]

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The evaluator computes no gradients."""
        raise UsageError("the evaluator computes no gradients")

    def measure(self) -> Measured:
        """Of the parameters as they are now."""
        self._copy.copy_(self._there)
        return measure(self._task, self._flat.module)


def memory_of(descriptor: int, plan: Plan) -> torch.Tensor:
    """The mapping of a job (1-D uint8), as long as it must be."""
    settings = plan.settings
    length = mapping.mapping_layout(plan.layout, settings.optimizer, settings.shards, settings.replicas).length
    if os.fstat(descriptor).st_size < length:
        os.ftruncate(descriptor, length)
    return torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
