"""A replica of a job without a server, as one process of a machine: it computes, and adds up its gradients with those of the others."""

from __future__ import annotations

import os
from collections.abc import Callable

from distbelief.cluster.spec import Spec
from distbelief.core import roles
from distbelief.core.assembly import Assemble
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.record.restore import Store
from distbelief.replica.allreduce import Allreduce
from distbelief.runtime.whole import TorchWhole
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, measure
from distbelief.transport.base import Arena
from distbelief.transport.memory import Memory

Compute = Callable[[Batch], Computed]


class Peer:
    """Who computes and reduces for one replica.

    Args:
        spec: of the job.
        role: of the replica.
        incarnation: of it.
        flat: its model.
        task: what is trained.
        padded: makes what computes as slow as the cluster's pace has it.
    """

    def __init__(self, spec: Spec, role: str, incarnation: int, flat: FlatModule, task: Task, padded: Callable[[Compute], Compute]) -> None:
        settings = spec.settings
        self._role, self._incarnation, self._task, self._flat = role, incarnation, task, flat
        self._trainer = Trainer(task, flat.module, settings.batch_size, settings.seed)
        self._compute = padded(self._trainer.compute)
        self._carrier = carrier(spec, role)
        self.whole = TorchWhole(flat, self._carrier, overlaps=True)
        self.store = Store(spec.run)

    def story(self, address: str) -> Allreduce:
        """What it plays."""
        return Allreduce(self._role, self.whole, len(self._trainer.data), address=address, incarnation=self._incarnation, reduces=True)

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Have the model live in its flat vector."""
        self.whole.bind(plan)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch."""
        return self._compute(batch)

    def measure(self) -> Measured:
        """The model on the test set."""
        return measure(self._task, self._flat.module)

    def form(self, group: Assemble) -> bool:
        """Take one's place in a group."""
        return self._carrier.form(group)

    def reduce(self, round: int, told: Callable[[], bool]) -> bool:
        """Add up the gradients of a round."""
        return self._carrier.reduce(round, told)


class Scripted:
    """The part of a replica whose loop is the user's: a step may be several backward passes, so that nothing is added up before it is over."""

    def __init__(self, spec: Spec, role: str, incarnation: int, address: str) -> None:
        self._role, self._incarnation, self._address = role, incarnation, address
        self._carrier = carrier(spec, role)
        self.store = Store(spec.run)

    def story(self, flat: FlatModule, samples: int, batch_size: int) -> Allreduce:
        """What it plays, for a model."""
        self.whole = TorchWhole(flat, self._carrier)
        return Allreduce(self._role, self.whole, samples, batch_size, self._address, self._incarnation, reduces=True)

    def form(self, group: Assemble) -> bool:
        """Take one's place in a group."""
        return self._carrier.form(group)

    def reduce(self, round: int, told: Callable[[], bool]) -> bool:
        """Add up the gradients of a round."""
        return self._carrier.reduce(round, told)


def carrier(spec: Spec, role: str) -> Memory:
    """What adds up the gradients of a replica."""
    descriptor = os.open(f"/proc/{spec.supervisor}/fd/{spec.memory}", os.O_RDWR)
    return Memory(descriptor, roles.index_of(role), spec.settings.replicas, spec.settings.algorithm, spec.settings.per_host)
