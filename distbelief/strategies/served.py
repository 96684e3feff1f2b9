"""Who computes in a process whose parameters are the shards': a trainer's gradients, or a task's measure; and the
memory that is read in place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import torch

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.replica.downpour import Downpour
from distbelief.replica.vectors import Vectors
from distbelief.runtime.player import Worker
from distbelief.runtime.pump import Pump
from distbelief.strategies.process import Compute, Context, Part, ProcessSpec, open_memory
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, measure
from distbelief.transport.base import Arena


class ServedWorker:
    """Who computes in a process: a trainer's gradients, or a task's measure."""

    def __init__(
        self,
        spec: ProcessSpec,
        role: str,
        vectors: FlatModule,
        compute: Compute | None,
        task: Task | None = None,
        pump: Pump | None = None,
    ) -> None:
        self._spec, self._role, self._vectors, self._compute, self._task, self._pump = (
            spec,
            role,
            vectors,
            compute,
            task,
            pump,
        )

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Have the module's parameters lie where answers land, or on the shards' own memory."""
        in_place = self._spec.memory >= 0 and roles.is_replica(self._role)
        if in_place and self._vectors.device.type != "cpu":
            raise UsageError(
                f"--read-in-place: the model is on {self._vectors.device}, which cannot compute on the shards' "
                "memory; leave it off"
            )
        self._vectors.bind(arena.gradients, [common_memory(self._spec, plan)] if in_place else arena.parameters)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch, while the links are carried where that needs somebody."""
        assert self._compute is not None
        if self._pump is None:
            return self._compute(batch)
        with self._pump.running():
            return self._compute(batch)

    def measure(self) -> Measured:
        """The parameters on the test set."""
        assert self._task is not None
        return measure(self._task, self._vectors.module)


def served_part(context: Context, story: Callable[[str, Vectors, int, int], Downpour]) -> Part:
    """What a process plays for a replica that shards serve, by what makes its story."""
    settings, flat = context.spec.settings, context.flat
    trainer = Trainer(
        context.task, flat.module, settings.data.batch_size, settings.seed, settings.clip_norm, settings.data.drop_last
    )
    worker = ServedWorker(context.spec, context.role, flat, context.padded(trainer.compute), pump=context.pump)
    return Part(story(context.role, flat, len(trainer.data), context.incarnation), worker)


def served_reader(spec: ProcessSpec, flat: FlatModule, task: Task) -> Worker:
    """Who measures for the evaluator, with what the shards answer."""
    return ServedWorker(spec, roles.EVALUATOR, flat, None, task)


def common_memory(spec: ProcessSpec, plan: Plan) -> torch.Tensor:
    """The whole vector in the memory that shards and replicas share for reading in place: 1-D uint8, `layout.total`
    bytes.
    """
    low = [s.dtype for s in plan.layout.sections if s.kind == "parameter" and s.dtype in ("bfloat16", "float16")]
    if low:
        raise UsageError(
            f"--read-in-place: {low[0]} parameters have float32 masters on the shards, which cannot be read in place; "
            "leave it off"
        )
    descriptor = open_memory(spec)
    try:
        os.ftruncate(descriptor, max(plan.layout.total, 1))
        return torch.frombuffer(mmap.mmap(descriptor, max(plan.layout.total, 1)), dtype=torch.uint8)[
            : plan.layout.total
        ]
    finally:
        os.close(descriptor)
